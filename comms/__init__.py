"""The public API of holdfast.comms: communicators, memory planes, errors and the plugin registry.

from holdfast import comms
comm = comms.connect("shm")
comm.all_reduce(tensor)
"""

from holdfast.comms import experts
from holdfast.comms._native import PreparedOp
from holdfast.comms.communicator import Communicator, CommunicatorInfo
from holdfast.comms.connect import KnownMembers, connect, connect_members, unconnected
from holdfast.comms.errors import (
    BackendUnavailable,
    CorruptData,
    HoldfastError,
    Mismatch,
    NonFinite,
    NotConnected,
    OpTimeout,
    PeerFailed,
    RegionGone,
    ResourceExhausted,
    Revoked,
    StaleEpoch,
    StillRunning,
    Unsupported,
    UsedAfterFork,
)
from holdfast.comms.memory_plane import Handle, MemoryPlane, Region, memory
from holdfast.comms.mesh import Mesh, mesh
from holdfast.comms.onesided.window import Window, WindowInfo, WindowWork
from holdfast.comms.ops import Recv, ReduceOp, Send
from holdfast.comms.plugins.registry import Backend, backends, register, unregister
from holdfast.comms.tensors.memory import Registration, empty
from holdfast.comms.work import Work

__all__ = [
    "Backend",
    "BackendUnavailable",
    "Communicator",
    "CommunicatorInfo",
    "CorruptData",
    "Handle",
    "HoldfastError",
    "KnownMembers",
    "MemoryPlane",
    "Mesh",
    "Mismatch",
    "NonFinite",
    "NotConnected",
    "OpTimeout",
    "PeerFailed",
    "PreparedOp",
    "Recv",
    "ReduceOp",
    "Region",
    "RegionGone",
    "Registration",
    "ResourceExhausted",
    "Revoked",
    "Send",
    "StaleEpoch",
    "StillRunning",
    "Unsupported",
    "UsedAfterFork",
    "Window",
    "WindowInfo",
    "WindowWork",
    "Work",
    "backends",
    "connect",
    "connect_members",
    "empty",
    "experts",
    "memory",
    "mesh",
    "register",
    "unconnected",
    "unregister",
]
