"""Tells whether a path is on a network file system, where SQLite's locks do not hold between hosts."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

NETWORK_FILE_SYSTEMS = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x00C36400: "Ceph",
    0x19830326: "BeeGFS",
    0x20030528: "OrangeFS",
    0x18031977: "WekaFS",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0x01161970: "GFS2",
    0x7461636F: "OCFS2",
}
"""What `statfs` says of a file system (`f_type`), and its name. FUSE may be local or not, so it is not listed."""

_STATFS_BYTES = 512


def network_file_system(path: Path) -> str | None:
    """The name of the network file system that an existing `path` is on; None for a local one. Raises OSError."""
    return NETWORK_FILE_SYSTEMS.get(_type_of(path))


def _type_of(path: Path) -> int:
    """The kernel's number for the type of the file system: the first word of `struct statfs`."""
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), found) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    return ctypes.c_long.from_buffer(found).value & 0xFFFFFFFF
