"""Addresses of functions of Open MPI, for compiled code that calls them without Python."""

from __future__ import annotations

import ctypes

from mpi4py import MPI

_LIBRARY = ctypes.CDLL(MPI.__file__)
"""The extension of mpi4py: the libraries that it is linked with are found through it."""


def _address(name: str) -> int:
    return ctypes.cast(_LIBRARY[name], ctypes.c_void_p).value or 0


ALL_REDUCE = _address("MPI_Iallreduce")
START = _address("MPI_Start")
TEST = _address("MPI_Test")
