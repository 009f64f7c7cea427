"""Strategies: by which volume name a process puts its values, as torchstore's strategies choose it.

Here a volume is a name in the directory, not a process: the bytes of all volumes lie in the process that initialised
the store. So `num_storage_volumes` says which names there are, and a transport type changes nothing.
"""

from __future__ import annotations

import importlib
import os
import socket
from enum import Enum, auto
from operator import attrgetter

from holdfast.comms.errors import Mismatch
from holdfast.store.torchstore.record import StoreRecord


class TransportType(Enum):
    """How torchstore moves bytes. Accepted, and kept; here the memory plane moves them in each case."""

    Unset = auto()
    MonarchRPC = auto()
    MonarchRDMA = auto()
    TorchComms = auto()
    TorchCommsRDMA = TorchComms
    Gloo = auto()
    SharedMemory = auto()


class TorchStoreStrategy:
    """The base of strategies. Subclasses say, in `get_client_id`, by which volume name this process puts values.

    A subclass of your own must be importable by its module and name in every process of the store.
    """

    def __init__(self, default_transport_type: TransportType = TransportType.Unset) -> None:
        self.default_transport_type = TransportType(default_transport_type)

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.default_transport_type.name})"

    @classmethod
    def get_volume_id(cls) -> str:
        """The name of the volume that this process is."""
        raise NotImplementedError(f"{cls.__name__} must implement 'get_volume_id'")

    @classmethod
    def get_client_id(cls) -> str:
        """The name of the volume that this process puts values into."""
        raise NotImplementedError(f"{cls.__name__} must implement 'get_client_id'")

    def volume_ids(self, num_storage_volumes: int) -> tuple[str, ...] | None:
        """The names of all volumes; None if any name will do."""
        return None


class HostStrategy(TorchStoreStrategy):
    """One volume for each host: HOSTNAME, which each process must have in its environment."""

    @classmethod
    def get_volume_id(cls) -> str:
        return os.environ.get("HOSTNAME", socket.gethostname())

    @classmethod
    def get_client_id(cls) -> str:
        return os.environ["HOSTNAME"]

    def volume_ids(self, num_storage_volumes: int) -> tuple[str, ...] | None:
        return (self.get_volume_id(),)


class LocalRankStrategy(TorchStoreStrategy):
    """One volume for each rank: RANK, or else LOCAL_RANK, which each process must have in its environment."""

    @classmethod
    def get_volume_id(cls) -> str:
        return cls.get_client_id()

    @classmethod
    def get_client_id(cls) -> str:
        rank = os.environ.get("RANK")
        return os.environ["LOCAL_RANK"] if rank is None else rank

    def volume_ids(self, num_storage_volumes: int) -> tuple[str, ...] | None:
        return tuple(map(str, range(num_storage_volumes)))


class ControllerStorageVolumes(TorchStoreStrategy):
    """One volume for all processes."""

    @classmethod
    def get_volume_id(cls) -> str:
        return "0"

    @classmethod
    def get_client_id(cls) -> str:
        return "0"

    def volume_ids(self, num_storage_volumes: int) -> tuple[str, ...] | None:
        return ("0",)


def describe(strategy: TorchStoreStrategy, num_storage_volumes: int) -> StoreRecord:
    """The record of a new store with a strategy. Raises `Mismatch` if other processes cannot import its class."""
    kind = type(strategy)
    volumes = strategy.volume_ids(num_storage_volumes)
    about = StoreRecord(
        strategy=(kind.__module__, kind.__qualname__),
        transport=strategy.default_transport_type.name,
        volumes=volumes,
    )
    strategy_of(about)
    return about


def strategy_of(about: StoreRecord) -> TorchStoreStrategy:
    """The strategy of a store. Raises `Mismatch` if its class cannot be imported here."""
    module, name = about.strategy
    try:
        kind = attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise Mismatch(
            f"the strategy {module}.{name} cannot be imported in this process: define it at the top level of a module "
            "that all processes of the store can import"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, TorchStoreStrategy)):
        raise Mismatch(f"{module}.{name} is not a strategy: make it a subclass of TorchStoreStrategy")
    return kind(TransportType[about.transport])
