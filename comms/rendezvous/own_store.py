"""`own_store`: a store that this process serves, for meetings that must not end with another process."""

from __future__ import annotations

import socket
import weakref
from collections.abc import Sequence

import torch.distributed as dist

from holdfast.comms.errors import HoldfastError
from holdfast.comms.rendezvous import tcp
from holdfast.comms.system import forks
from holdfast.comms.system.environment import own_address
from holdfast.comms.system.signal_safety import shared_lock
from holdfast.comms.transport.base import Peer

LOOPBACK = "127.0.0.1"

_lock = shared_lock()
_serving: weakref.WeakValueDictionary[str, dist.TCPStore] = weakref.WeakValueDictionary()
"""By address, the store that all users in this process share."""


@forks.run_in_children
def _begin_child() -> None:
    """Forget the parent's stores: their threads do not exist in a forked child."""
    global _lock
    _lock = shared_lock()
    for store in _serving.values():
        forks.never_destroy(store)
    _serving.clear()


def own_store(address: str, timeout: float) -> dist.TCPStore:
    """The store that this process serves at `address`. It ends when it is referenced no more."""
    with _lock:
        store = _serving.get(address)
        if store is None:
            store = _serving[address] = tcp.serve(address, 0, timeout)
        return store


def address_for(peers: Sequence[Peer]) -> str:
    """Where `peers` reach this process: loopback on one host, else what HOLDFAST_HOST or HOLDFAST_INTERFACE says.

    Without that it is what this host's name stands for.
    """
    if len({peer.host for peer in peers}) <= 1:
        return LOOPBACK
    try:
        return own_address() or socket.gethostbyname(socket.gethostname())
    except OSError as error:
        raise HoldfastError(
            f"this host's name has no address ({error}), and the other ranks are on other hosts; set "
            "HOLDFAST_INTERFACE to an address that they reach"
        ) from error
