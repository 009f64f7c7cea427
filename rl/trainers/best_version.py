"""The best version of the weights by evaluation, kept as a folder that transformers loads."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import msgspec

from holdfast.comms.errors import CorruptData
from holdfast.rl.generators.models import ModelSource
from holdfast.store import Lease, WeightStore
from holdfast.store.interop.safetensors import export_version

RECORD = "best.json"


class BestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The best version so far, its reward, and the name of its folder."""

    version: int
    reward: float
    folder: str


def read_best(directory: Path) -> BestRecord | None:
    """The record in a directory of the best version; None if there is none yet. Raises `CorruptData`."""
    record = directory / RECORD
    if not record.exists():
        return None
    try:
        return msgspec.json.decode(record.read_bytes(), type=BestRecord)
    except msgspec.DecodeError as error:
        raise CorruptData(f"{record} is no record of a best version: {error}; delete it") from error


class BestVersion:
    """Holds versions of a store while they are evaluated, and keeps the best one in `directory`.

    The record there names the best one's folder, which is whole; another run may go on from it. Raises `CorruptData`
    for a record that cannot be read.
    """

    def __init__(self, store: WeightStore, directory: Path, source: ModelSource, timeout: float = 60.0) -> None:
        self._store, self._directory, self._source, self._timeout = store, directory, source, timeout
        self._held: dict[int, Lease] = {}
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._best = read_best(directory)

    @property
    def version(self) -> int | None:
        """The best version so far."""
        return None if self._best is None else self._best.version

    @property
    def reward(self) -> float | None:
        """The reward of the best version."""
        return None if self._best is None else self._best.reward

    @property
    def folder(self) -> Path | None:
        """The folder of the best version."""
        return None if self._best is None else self._directory / self._best.folder

    async def hold(self, version: int) -> None:
        """Wait for a version, and keep it in the store until it is released. Raises the store's errors."""
        await asyncio.to_thread(self._hold, version)

    async def keep_best(self, version: int, reward: float) -> None:
        """Write a held version to disk as the best one, instead of the one before, and release it."""
        await asyncio.to_thread(self._keep, version, reward)
        await self.release(version)

    async def release(self, version: int) -> None:
        """Let a held version go; no effect if it is not held."""
        lease = self._held.pop(version, None)
        if lease is not None:
            await asyncio.to_thread(lease.release)

    def _hold(self, version: int) -> None:
        self._store.wait(version, self._timeout)
        self._held[version] = self._store.pin(version)

    def _keep(self, version: int, reward: float) -> None:
        before = self.folder
        folder = self._directory / f"version-{version}"
        if folder == before:  # of a driver before this one: the number may have had other weights then
            folder = self._directory / f"version-{version}-again"
        shutil.rmtree(folder, ignore_errors=True)  # of a run that died before it was in the record
        export_version(self._store, version, folder, timeout=self._timeout)
        self._source.save_config(folder)
        best = BestRecord(version=version, reward=reward, folder=folder.name)
        draft = self._directory / f"{RECORD}.draft"
        draft.write_bytes(msgspec.json.encode(best))
        draft.replace(self._directory / RECORD)
        self._best = best
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)
