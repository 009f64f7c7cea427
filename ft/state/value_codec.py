"""Encodes single Python values of state dicts exactly, as msgpack nodes; containers belong to the caller.

A node's type is its tag, so that an int stays an int and NaN, infinities and -0.0 keep their bits. A subclass of a
Python type is encoded as that type; not so enumerations: their members would come back as something else.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec
import numpy as np
import torch

from holdfast.comms.errors import CorruptData

_WORD = 1 << 63
_NUMPY_NUMBERS = {np.dtype(code).str for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]}
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class EncodedNode(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The base of all nodes, of values and of a caller's containers."""


class Plain(EncodedNode, frozen=True, array_like=True, forbid_unknown_fields=True, tag="v"):
    value: bool | int | float | str | None


class Bytes(EncodedNode, frozen=True, array_like=True, forbid_unknown_fields=True, tag="b"):
    value: bytes


class BigInteger(EncodedNode, frozen=True, array_like=True, forbid_unknown_fields=True, tag="i"):
    """An integer of more than 64 bits, in hexadecimal: Python limits the digits of decimal ones."""

    digits: str


class Complex(EncodedNode, frozen=True, array_like=True, forbid_unknown_fields=True, tag="c"):
    real: float
    imag: float


class NumpyNumber(EncodedNode, frozen=True, array_like=True, forbid_unknown_fields=True, tag="n"):
    """A number of a numpy type: as a Python number it would compute other bits."""

    dtype: str
    data: bytes


class Dtype(EncodedNode, frozen=True, array_like=True, forbid_unknown_fields=True, tag="y"):
    name: str


class Size(EncodedNode, frozen=True, array_like=True, forbid_unknown_fields=True, tag="z"):
    sizes: tuple[int, ...]


ValueNode = Plain | Bytes | BigInteger | Complex | NumpyNumber | Dtype | Size


def encode_value(value: object) -> ValueNode | None:
    """The node of a number (numpy's too), text, bytes, None, `torch.dtype` or `torch.Size`; None for anything else."""
    match value:
        case Enum():
            return None
        case np.generic() if value.dtype.str in _NUMPY_NUMBERS:
            return NumpyNumber(value.dtype.str, value.tobytes())
        case None | bool():
            return Plain(value)
        case float():
            return Plain(float(value))
        case str():
            return Plain(str.__str__(value))
        case bytes():
            return Bytes(bytes(value))
        case int():
            number = int.__int__(value)
            return Plain(number) if -_WORD <= number < _WORD else BigInteger(f"{number:x}")
        case complex():
            return Complex(value.real, value.imag)
        case torch.dtype():
            return Dtype(str(value))
        case torch.Size():
            return Size(tuple(value))
    return None


def decode_value(node: ValueNode) -> Any:
    """The value that `encode_value` was given. Raises `CorruptData` for a node that it does not make."""
    match node:
        case Plain(value) | Bytes(value):
            return value
        case BigInteger(digits):
            return _integer(digits)
        case Complex(real, imag):
            return complex(real, imag)
        case Dtype(name):
            if name not in _DTYPES:
                raise CorruptData(f"{name[:80]!r} is not a dtype of torch {torch.__version__}")
            return _DTYPES[name]
        case Size(sizes):
            return torch.Size(sizes)
        case NumpyNumber(name, data):
            if name not in _NUMPY_NUMBERS or np.dtype(name).itemsize != len(data):
                raise CorruptData(f"{len(data)} bytes are not a number of numpy's type {name[:80]!r}")
            return np.frombuffer(data, name)[0]


def _integer(digits: str) -> int:
    try:
        return int(digits, 16)
    except ValueError as error:
        raise CorruptData(f"{digits[:80]!r} is not a hexadecimal integer") from error
