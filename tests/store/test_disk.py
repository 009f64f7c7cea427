"""Versions on disk: directories of safetensors and of torch.distributed.checkpoint, and the copies that a store keeps.

What others read and what comes back; which copies are written and by which process, and what a death leaves.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import struct
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as plain_dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.utils._pytree import tree_map

from holdfast.comms.errors import CorruptData, HoldfastError, Unsupported
from holdfast.comms.transport.base import Peer
from holdfast.harness.chaos.faults.storage import small_disk
from holdfast.store import NoSuchVersion, WeightStore
from holdfast.store.catalog import disk_copies, transitions
from holdfast.store.catalog.records import Catalog, Holder, Retainer
from holdfast.store.errors import CopyFailed, NoRoomOnDisk
from holdfast.store.interop import dcp, import_version, safetensors
from holdfast.store.interop.dcp import DcpDirectory
from holdfast.store.interop.disk_copy import read_record, shares
from holdfast.store.interop.safetensors import INDEX, SafetensorsDirectory
from holdfast.store.retention import DiskRetention, copies, copy_path, restore
from support.children import Start
from support.mutations import damages, mutated
from support.waiting import eventually
from support.weights.catalogs import announced
from support.weights.state_dicts import a_llama, of_many_dtypes, same, value_in, weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def files(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors in a directory, as the safetensors package reads them."""
    return {name: each for path in directory.glob("*.safetensors") for name, each in load_file(path).items()}


def test_safetensors_reads_what_was_exported_in_files_of_the_size_asked_for(store: WeightStore, tmp_path: Path) -> None:
    state = of_many_dtypes()
    store.publish(3, state)
    assert safetensors.export_version(store, "latest", tmp_path / "copy", shard_bytes=200_000) == 3
    found = files(tmp_path / "copy")
    assert found.keys() == state.keys()
    assert all(same(found[name], state[name]) for name in state)
    index = json.loads((tmp_path / "copy" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    assert index["weight_map"].keys() == state.keys()
    assert all(name in load_file(tmp_path / "copy" / place) for name, place in index["weight_map"].items())
    shards = sorted((tmp_path / "copy").glob("*.safetensors"))
    assert [path.name for path in shards] == [
        f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)
    ]
    sizes = [sum(each.nbytes for each in load_file(path).values()) for path in shards]
    assert len(shards) > 3 and all(size <= 200_000 for size in sizes)
    safetensors.export_version(store, 3, tmp_path / "small", shard_bytes=1000)
    alone = [load_file(path) for path in (tmp_path / "small").glob("*.safetensors")]
    assert all(len(each) == 1 or sum(tensor.nbytes for tensor in each.values()) <= 1000 for each in alone)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_transformers_loads_an_exported_model(store: WeightStore, tmp_path: Path, tied: bool) -> None:
    model = a_llama(tied).to(torch.bfloat16)
    store.publish(1, model.state_dict())
    safetensors.export_version(store, 1, tmp_path / "model", shard_bytes=20_000)
    model.config.save_pretrained(tmp_path / "model")
    loaded, notes = type(model).from_pretrained(tmp_path / "model", dtype=torch.bfloat16, output_loading_info=True)
    assert not notes["missing_keys"] and not notes["unexpected_keys"] and not notes["mismatched_keys"]
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    expected = model.state_dict()
    assert all(same(tensor, expected[name]) for name, tensor in loaded.state_dict().items())


def test_a_model_that_transformers_saved_fills_a_store(store: WeightStore, tmp_path: Path) -> None:
    model = a_llama(tied=False)
    for version, limit in ((1, "10GB"), (2, "20KB")):
        model.save_pretrained(tmp_path / limit, max_shard_size=limit)
        assert import_version(store, tmp_path / limit, version) == version
        found = store.load(version)
        assert all(same(found[name], tensor) for name, tensor in model.state_dict().items())


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 9))
def test_shares_hold_each_tensor_once_and_differ_by_no_more_than_one_tensor(nbytes: list[int], count: int) -> None:
    sizes = {str(number): each for number, each in enumerate(nbytes)}
    found = shares(sizes, count)
    assert sorted(name for share in found for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in found]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


# -- what is refused


def test_a_directory_that_exists_is_not_touched(store: WeightStore, tmp_path: Path) -> None:
    store.publish(3, of_many_dtypes())
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "notes.txt").write_text("keep me")
    (tmp_path / "file").touch()
    for name in ("copy", "file"):
        with pytest.raises(CopyFailed, match="exists already"):
            safetensors.export_version(store, 3, tmp_path / name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["copy", "file", "notes.txt"]
    (tmp_path / "copy" / "notes.txt").unlink()
    safetensors.export_version(store, 3, tmp_path / "copy")  # an empty one is taken
    assert (tmp_path / "copy" / INDEX).exists()


def test_a_dtype_that_the_format_lacks_and_a_missing_version_write_nothing(store: WeightStore, tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "none"):
        with pytest.raises(CopyFailed, match="neither safetensors"):
            import_version(store, directory, 1)
    store.publish(1, {"a": torch.ones(2, dtype=torch.complex128), "b": torch.ones(2)})
    with pytest.raises(Unsupported, match=r"a \(complex128\)"):
        safetensors.export_version(store, 1, tmp_path / "copy")
    with pytest.raises(NoSuchVersion):
        safetensors.export_version(store, 2, tmp_path / "copy")
    assert not list(tmp_path.iterdir())


def test_a_dtype_of_the_format_that_a_store_lacks_is_refused(store: WeightStore, tmp_path: Path) -> None:
    header = json.dumps({"packed": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    with pytest.raises(Unsupported, match=r"packed \(F4\)"):
        import_version(store, tmp_path, 1)
    assert store.versions() == []


def test_an_index_cannot_name_files_elsewhere(store: WeightStore, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / "secret.safetensors")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / INDEX).write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(CorruptData, match="outside of its directory"):
        import_version(store, tmp_path / "copy", 1)


# -- deaths, and memory


def test_a_killed_export_leaves_no_version_and_the_next_one_cleans_up(url: str, tmp_path: Path, start: Start) -> None:
    """It dies by SIGKILL when all bytes are written."""

    def export(pipe: Connection) -> None:
        def progress(done: int, total: int) -> None:
            if done == total:
                pipe.send("dying")
                os.kill(os.getpid(), signal.SIGKILL)

        with WeightStore(url, hold=False) as store:
            safetensors.export_version(store, 1, tmp_path / "copies" / "1", shard_bytes=1 << 20, progress=progress)

    state = {f"{number}": torch.randn(100_000) for number in range(10)}
    with WeightStore(url, replicas=1) as store:
        store.publish(1, state)
        child = start(export)
        child.hear()
        child.kill()
        (left,) = (tmp_path / "copies").iterdir()
        assert left.name.startswith(".") and left.name.endswith(".partial")
        safetensors.export_version(store, 1, tmp_path / "copies" / "1")
        assert [path.name for path in (tmp_path / "copies").iterdir()] == ["1"]
        assert all(same(tensor, state[name]) for name, tensor in files(tmp_path / "copies" / "1").items())


def test_an_export_needs_memory_for_one_batch_only(url: str, tmp_path: Path, start: Start) -> None:
    """The private memory of its process is watched; pages of the holder do not count."""

    def export(pipe: Connection) -> None:
        with WeightStore(url, hold=False) as reader:
            for name in ("warm", "copy"):
                safetensors.export_version(reader, 1, tmp_path / name)
                pipe.send(name)
                pipe.recv()

    def private_bytes() -> int:
        lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

    state = {f"{number}": torch.ones(2 << 20) for number in range(24)}
    with WeightStore(url, replicas=1) as store:
        store.publish(1, state)
        child = start(export)
        child.hear()
        before, seen = private_bytes(), [0]
        child.tell("go on")
        while not child.pipe.poll(0.001):
            seen.append(private_bytes())
        assert child.hear() == "copy"
    assert max(seen) - before < 140e6, f"{sum(each.nbytes for each in state.values())} bytes were exported"


def plain_weights() -> dict[str, torch.Tensor]:
    return {
        "model.weight": torch.randn(30, 40),
        "model.transposed": torch.randn(9, 7).t(),
        "half": torch.randn(17).to(torch.bfloat16),
        "eight": torch.randn(5).to(torch.float8_e4m3fn),
        "complex": torch.randn(3, dtype=torch.complex128),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
    }


def save(state: dict[str, Any], directory: Path) -> Path:
    plain_dcp.save(state, storage_writer=plain_dcp.FileSystemWriter(directory), no_dist=True)
    return directory


def test_a_checkpoint_of_dcp_fills_a_store_nested_as_it_was(store: WeightStore, tmp_path: Path) -> None:
    weight, bias = torch.randn(3), torch.randn(2)
    optimizer = {"lr": 0.1, "betas": (0.9, 0.99)}
    nested = {"a": weight, "layers": [bias, weight]}
    state = {**plain_weights(), "nested": nested, "step": 3, "optimizer": optimizer}
    save(state, tmp_path / "theirs")
    with pytest.raises(ValueError, match="say which version"):
        import_version(store, tmp_path / "theirs")
    assert import_version(store, tmp_path / "theirs", 5) == 5
    found = store.load(5)
    assert found.keys() == state.keys() and found["optimizer"] == optimizer
    assert all(same(found[name], each) for name, each in state.items() if name not in ("nested", "optimizer"))
    assert all(same(nested[name], found["nested"][name]) for name in nested)


# -- what is refused


class Exploit:
    """An object that runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_a_checkpoint_cannot_run_code_by_its_metadata_or_by_a_value(store: WeightStore, tmp_path: Path) -> None:
    directory = save({"a": torch.zeros(3), "value": Exploit(tmp_path / "ran")}, tmp_path / "theirs")
    with pytest.raises(Unsupported, match="'value' in"):
        import_version(store, directory, 1)
    (directory / ".metadata").write_bytes(pickle.dumps(Exploit(tmp_path / "ran")))
    with pytest.raises(CorruptData, match=r"posix\.system, which DCP does not write"):
        import_version(store, directory, 1)
    assert not (tmp_path / "ran").exists() and store.versions() == []


def changed(directory: Path, change: Callable[[Metadata], object]) -> Path:
    """A checkpoint of DCP with other metadata."""
    path = directory / dcp.METADATA
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    return directory


def test_values_of_a_checkpoint_come_in_its_order(tmp_path: Path) -> None:
    """So each process that imports it publishes the same bytes."""
    directory = save({f"value {number}": number for number in range(30)}, tmp_path / "theirs")
    order: list[str] = []
    changed(directory, lambda metadata: order.extend(metadata.state_dict_metadata))
    assert list(DcpDirectory(directory).state({}, 0, 1)) == order


@pytest.mark.parametrize("path", [("a",), ("a", 0), ("a", "b")], ids=str)
def test_two_values_at_one_place_of_a_checkpoint_are_refused(tmp_path: Path, path: tuple[str | int, ...]) -> None:
    directory = save({"a": torch.zeros(3), "z": torch.ones(())}, tmp_path / "theirs")
    found = DcpDirectory(changed(directory, lambda metadata: metadata.planner_data.update(z=path)))
    with pytest.raises(CorruptData, match="two values at one place"):
        found.state({name: found.read(name) for name in found.sizes}, 0, 1)


def test_a_value_in_an_empty_file_is_damaged(tmp_path: Path) -> None:
    directory = save({"step": 3}, tmp_path / "theirs")
    (directory / "empty").touch()

    def elsewhere(metadata: Metadata) -> None:
        ((index, place),) = metadata.storage_data.items()
        metadata.storage_data[index] = replace(place, relative_path="empty", offset=0, length=0)

    with pytest.raises(CorruptData, match=r"'step' in .* is damaged"):
        DcpDirectory(changed(directory, elsewhere)).state({}, 0, 1)


def test_metadata_that_announces_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    for op, words in (
        (b"r" + struct.pack("<I", 1 << 31), "it numbers a value 2147483648, and has 9 bytes"),
        (b"\x96" + struct.pack("<Q", 1 << 40), "expected 1099511627776 bytes"),
    ):
        (tmp_path / ".metadata").write_bytes(b"\x80\x05N" + op + b".")
        with pytest.raises(CorruptData, match=words):
            DcpDirectory(tmp_path)


FUZZED = {"safetensors": (INDEX, "holdfast.json"), "dcp": (".metadata", "__0_0.distcp")}


@pytest.mark.parametrize("kind", FUZZED)
@given(damages)
def test_no_mutation_of_a_directory_raises_anything_but_our_errors(
    tmp_path_factory: pytest.TempPathFactory, kind: str, damage: tuple[str, int, int]
) -> None:
    directory = tmp_path_factory.getbasetemp() / f"fuzzed {kind}"
    state = {"a": torch.zeros(10), "nested": {"b": [torch.zeros(3)], "step": 3}}
    if kind == "dcp" and not directory.exists():
        save(state, directory)
    elif not directory.exists():
        with WeightStore(f"memory://{directory}") as store:
            store.publish(3, state)
            safetensors.export_version(store, 3, directory)
    for name in FUZZED[kind]:
        right = (directory / name).read_bytes()
        try:
            (directory / name).write_bytes(mutated([right], *damage)[0])
            with nullcontext(DcpDirectory(directory)) if kind == "dcp" else SafetensorsDirectory(directory) as found:
                found.state({each: found.read(each) for each in found.sizes}, 0, 1)
        except HoldfastError:
            pass
        finally:
            (directory / name).write_bytes(right)


Export = Callable[..., int]


@pytest.fixture(params=[dcp, safetensors], ids=["dcp", "safetensors"])
def export(request: pytest.FixtureRequest) -> Export:
    exported: Export = request.param.export_version
    return exported


def training_state() -> dict[str, Any]:
    """A model with a tied weight, its optimizer after a step, and values of several types."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(20, 8), "layer": nn.Linear(8, 8), "head": nn.Linear(8, 20, bias=False)}
    )
    model["head"].weight = model["embedding"].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model["head"](model["layer"](model["embedding"](torch.arange(5)))).sum().backward()
    optimizer.step()
    return {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "step": 7,
        "notes": {"name": "run", "betas": (0.9, 0.99), "empty": [], "none": None, "dtype": torch.bfloat16},
    }


def zeroed(state: dict[str, Any]) -> dict[str, Any]:
    """Copy the structure of a training state, with 0 for its tensors and its step."""
    found = tree_map(lambda each: torch.zeros_like(each) if isinstance(each, torch.Tensor) else each, state)
    return {**found, "step": 0}


def test_a_training_state_comes_back(store: WeightStore, other: WeightStore, tmp_path: Path, export: Export) -> None:
    frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)
    state = training_state() | {"many": of_many_dtypes(), "leaves": [nn.Parameter(torch.ones(2)), frozen]}
    store.publish(1, state)
    export(store, 1, tmp_path / "copy")
    for _ in range(2):
        assert import_version(other, tmp_path / "copy") == 1
    found = other.load(1)
    assert same(state, found)
    assert [type(each) for each in found["leaves"]] == 2 * [nn.Parameter] and not found["leaves"][1].requires_grad
    assert found["model"]["head.weight"] is found["model"]["embedding.weight"]
    one, two = ([part.digest for part in each.inspect().content(1).parts] for each in (store, other))
    assert one == two, "the same version, for every process of both stores"
    names = [name for path in (tmp_path / "copy").glob("*.safetensors") for name in load_file(path)]
    tied = [name for name in names if name in ("model.embedding.weight", "model.head.weight")]
    assert len(tied) == bool(names), "tied tensors are in the files once"


def test_shares_fill_a_training_state(store: WeightStore, other: WeightStore, tmp_path: Path, export: Export) -> None:
    state = training_state()
    store.publish(1, state)
    export(store, 1, tmp_path / "copy")
    for part in range(3):
        assert other.versions() == []
        import_version(other, tmp_path / "copy", part=part, parts=3)
    into = zeroed(state)
    assert other.get(1, into) == 1
    assert same(into, state)


def test_plain_dcp_loads_a_nested_state(store: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = training_state() | plain_weights()
    store.publish(1, state)
    monkeypatch.setattr(dcp, "FILE_BYTES", 1000)
    assert dcp.export_version(store, "latest", tmp_path / "copy") == 1
    assert len(list((tmp_path / "copy").glob("*.distcp"))) > 2
    into = zeroed(state)
    plain_dcp.load(into, storage_reader=plain_dcp.FileSystemReader(tmp_path / "copy"), no_dist=True)
    assert same(into, state)


def test_tensors_in_tuples_are_found_by_plain_dcp_by_their_names(store: WeightStore, tmp_path: Path) -> None:
    pair = torch.randn(3), torch.randn(4)
    store.publish(1, {"pair": pair, "step": 3, "notes": {"none": []}})
    dcp.export_version(store, 1, tmp_path / "copy")
    into = {"pair.0": torch.zeros(3), "pair.1": torch.zeros(4), "step": 0, "notes": {"none": []}}
    plain_dcp.load(into, storage_reader=plain_dcp.FileSystemReader(tmp_path / "copy"), no_dist=True)
    assert same(into, {"pair.0": pair[0], "pair.1": pair[1], "step": 3, "notes": {"none": []}})


# -- what is refused, in both formats


def test_a_full_disk_is_a_typed_error_and_leaves_nothing(store: WeightStore, tmp_path: Path, export: Export) -> None:
    store.publish(1, {"a": torch.ones(500_000)})
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        for megabytes in (1.0, 2.0, 2.004):  # the last two have room for the tensor, but not for all beside it
            with small_disk(disk, megabytes):
                with pytest.raises(NoRoomOnDisk, match="2000000 bytes" if megabytes == 1.0 else None):
                    export(store, 1, disk / "copy")
                assert not list(disk.iterdir())
    except Unsupported as error:
        pytest.skip(str(error))


def test_a_changed_byte_is_found(store: WeightStore, other: WeightStore, tmp_path: Path, export: Export) -> None:
    store.publish(3, {"a": torch.full((1000,), 3.0)})
    export(store, 3, tmp_path / "copy")
    (path,) = (each for each in (tmp_path / "copy").iterdir() if each.suffix in (".safetensors", ".distcp"))
    data = bytearray(path.read_bytes())
    data[data.index(torch.full((100,), 3.0).numpy().tobytes()) + 20] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptData, match="other bytes than were exported, in a"):
        import_version(other, tmp_path / "copy")
    assert other.versions() == []


def test_every_fault_of_a_directory_is_in_one_error_and_nothing_is_published(
    store: WeightStore,
    other: WeightStore,
    tmp_path: Path,
    export: Export,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store.publish(3, {f"{number}": torch.randn(100) for number in range(6)})
    monkeypatch.setattr(dcp, "FILE_BYTES", 1000)
    export(store, 3, tmp_path / "copy", **({"shard_bytes": 1000} if export is safetensors.export_version else {}))
    one, two, *_ = sorted(each for each in (tmp_path / "copy").iterdir() if each.suffix in (".safetensors", ".distcp"))
    one.unlink()
    two.write_bytes(two.read_bytes()[:-500])
    with pytest.raises(CorruptData) as caught:
        import_version(other, tmp_path / "copy")
    assert one.name in str(caught.value) and two.name in str(caught.value)
    assert other.versions() == []


class Events:
    """The events of a retention: (kind, version)."""

    def __init__(self) -> None:
        self.all: list[tuple[str, dict[str, object]]] = []

    def __call__(self, kind: str, fields: dict[str, object]) -> None:
        self.all.append((kind, fields))

    def versions(self, kind: str) -> list[object]:
        return [fields["version"] for each, fields in self.all if each == kind]


# -- copies that a store keeps: which versions


@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
def test_every_kth_version_is_on_disk_whole_and_old_copies_are_removed(
    store: WeightStore, other: WeightStore, tmp_path: Path, kind: Any
) -> None:
    happened = Events()
    with DiskRetention(store, tmp_path / "copies", every=3, keep=2, format=kind, observe=happened):
        for version in range(8):
            store.publish(version, weights(version))
            if version % 3 == 1:
                eventually(lambda: not disk_copies.due(store._read()))
    assert happened.versions("disk_copied") == [0, 3, 6] and happened.versions("disk_removed") == [0]
    assert list(copies(tmp_path / "copies")) == [3, 6] and len(list((tmp_path / "copies").iterdir())) == 2
    assert restore(other, tmp_path / "copies") == 6
    assert other.versions() == [6] and value_in(other, 6) == 6.0


# -- failures


def test_a_directory_of_another_run_is_not_overwritten_and_a_copy_that_is_right_is_kept(
    store: WeightStore, other: WeightStore, tmp_path: Path
) -> None:
    with WeightStore(f"memory://{tmp_path}/before") as before:
        before.publish(0, weights(7.0))
        before.publish(1, weights(2.0))
        for version in (0, 1):
            safetensors.export_version(before, version, copy_path(tmp_path / "copies", version))
    written = copy_path(tmp_path / "copies", 1).stat().st_ino
    happened = Events()
    with DiskRetention(store, tmp_path / "copies", observe=happened):
        store.publish(0, weights(1.0))
        eventually(lambda: happened.versions("disk_failed") == [0])
        store.publish(1, weights(2.0))
        eventually(lambda: happened.versions("disk_copied") == [1])
    assert copy_path(tmp_path / "copies", 1).stat().st_ino == written
    (why,) = (fields["why"] for kind, fields in happened.all if kind == "disk_failed")
    assert "it exists already" in str(why)
    copy_path(tmp_path / "copies", 1).rename(tmp_path / "gone")
    assert restore(other, tmp_path / "copies") == 0 and value_in(other, 0) == 7.0


def test_wrong_arguments_are_refused(store: WeightStore, tmp_path: Path) -> None:
    for name, wrong in (("every", 0), ("keep", 0), ("format", "zip"), ("timeout", float("nan"))):
        with pytest.raises(ValueError, match=name):
            DiskRetention(store, tmp_path, **{name: wrong})


# -- several processes


def retains(pipe: Connection, url: str, directory: Path, slow: bool) -> None:
    """Hold replicas, and copy versions to disk until the parent says so; a `slow` process stops in the middle."""

    def observe(kind: str, fields: dict[str, object]) -> None:
        pipe.send((kind, fields["version"]))

    if slow:

        def wait_for_ever(self: DiskRetention) -> None:
            pipe.send(("writing", None))
            threading.Event().wait()

        DiskRetention._check_abort = wait_for_ever  # type: ignore[method-assign]
    with WeightStore(url) as store, DiskRetention(store, directory, every=10, observe=observe):
        pipe.send("ready")
        pipe.recv()


def test_a_killed_writer_leaves_its_copy_to_another(url: str, other: WeightStore, tmp_path: Path, start: Start) -> None:
    directory = tmp_path / "copies"
    first = start(retains, url, directory, True)
    assert first.hear() == "ready"
    with WeightStore(url) as store:
        store.publish(0, weights(0.0))
        assert first.hear() == ("writing", None)
        assert copies(directory) == {} and len(list(directory.iterdir())) == 1
        second = start(retains, url, directory, False)
        assert second.hear() == "ready"
        for version in range(1, 6):
            store.publish(version, weights(version))
        assert copies(directory) == {} and store.versions() == [0, 4, 5], "what waits for the disk stays"
        first.kill()
        assert second.hear() == ("disk_copied", 0)
        second.tell("end")
        second.end()
    assert [path.name for path in directory.iterdir()] == [copy_path(directory, 0).name]
    assert restore(other, directory) == 0 and value_in(other, 0) == 0.0


def test_a_closed_writer_leaves_its_copy_to_another(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    held, check = threading.Event(), DiskRetention._check_abort

    def wait_for_abort(self: DiskRetention) -> None:
        held.set()
        self._abort.wait(20.0)
        check(self)

    happened = Events()
    with WeightStore(url, replicas=1) as store:
        monkeypatch.setattr(DiskRetention, "_check_abort", wait_for_abort)
        first = DiskRetention(store, tmp_path / "copies")
        store.publish(0, weights(3.0))
        assert held.wait(20.0)
        first.close(0.05)
        monkeypatch.setattr(DiskRetention, "_check_abort", check)
        assert not list((tmp_path / "copies").iterdir())
        with DiskRetention(store, tmp_path / "copies", observe=happened):
            eventually(lambda: happened.versions("disk_copied") == [0])


# -- coming back


def test_restore_takes_the_newest_copy_that_is_whole(store: WeightStore, other: WeightStore, tmp_path: Path) -> None:
    with WeightStore(f"memory://{tmp_path}/before", keep=5) as before:
        for version in range(3):
            before.publish(version, weights(version))
            safetensors.export_version(before, version, copy_path(tmp_path / "copies", version))
    (shard,) = copy_path(tmp_path / "copies", 2).glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    damaged: list[Path] = []
    assert restore(store, tmp_path / "copies", damaged=lambda path, error: damaged.append(path)) == 1
    assert value_in(store, 1) == 1.0 and damaged == [copy_path(tmp_path / "copies", 2)]
    assert read_record(copy_path(tmp_path / "copies", 1)) is not None
    for version in range(3):
        (copy_path(tmp_path / "copies", version) / "holdfast.json").write_text("{}")
    with pytest.raises(CorruptData, match=r"holdfast\.json"):
        restore(other, tmp_path / "copies")


def test_restore_leaves_a_store_that_is_newer_as_it_is_and_several_processes_restore_shares(
    store: WeightStore, other: WeightStore, tmp_path: Path
) -> None:
    assert restore(store, tmp_path / "none") is None
    store.publish(3, weights(3.0))
    safetensors.export_version(store, 3, copy_path(tmp_path / "copies", 3))
    store.publish(4, weights(4.0))
    assert restore(store, tmp_path / "copies") == 4
    assert store.versions() == [3, 4]
    for part in range(2):
        assert other.versions() == [] and restore(other, tmp_path / "copies", part=part, parts=2) == 3
    assert value_in(other, 3) == 3.0


# -- the catalogue

RETAINERS = [Retainer(name, Peer("host", number, 1), 2) for number, name in enumerate("abc")]
STEPS = st.tuples(st.sampled_from(["publish", "join", "claim", "finish", "give up", "leave", "die"]), st.integers(0, 2))


def published(catalog: Catalog, number: int) -> Catalog:
    """The catalogue after one part of a version was published, of which one replica is wanted."""
    return announced(transitions.join(catalog, Holder("holder", Peer("host", 99, 1))), "holder", number)


def apply(catalog: Catalog, step: str, which: int) -> Catalog:
    retainer = RETAINERS[which]
    match step:
        case "publish":
            return published(catalog, max(catalog.visible(), default=-1) + 1)
        case "join":
            return disk_copies.join(catalog, retainer)
        case "leave":
            return disk_copies.leave(catalog, retainer)
        case "die":
            return transitions.remove_dead_holders(catalog, {retainer.peer})
        case "claim":
            due = disk_copies.due(catalog)[:1]
            return disk_copies.claim(catalog, due[0], retainer) if due else catalog
    writers = [each for each in RETAINERS if disk_copies.claimed(catalog, each)]
    if not writers:
        return catalog
    writer = writers[which % len(writers)]
    change = disk_copies.finish if step == "finish" else disk_copies.give_up
    return change(catalog, disk_copies.claimed(catalog, writer)[0], writer)


def on_disk(catalog: Catalog) -> set[int]:
    return {copy.version for copy in catalog.disk if copy.done}


def waiting(catalog: Catalog) -> set[int]:
    return {copy.version for copy in catalog.disk if not copy.done}


@given(st.lists(STEPS, min_size=30, max_size=60))
def test_every_version_that_is_due_stays_until_one_process_has_copied_it(steps: list[tuple[str, int]]) -> None:
    """Whatever joins, leaves, dies and fails."""
    catalog, finished = Catalog(), list[int]()
    for step, which in steps:
        before, catalog = catalog, apply(catalog, step, which)
        assert Catalog.decode(catalog.encode()) == catalog
        written = waiting(before) - waiting(catalog) if step == "finish" else set()
        assert on_disk(catalog) == {*sorted(on_disk(before) | written)[-1:]}, "the newest is remembered"
        finished += on_disk(catalog) - on_disk(before)
        versions = [copy.version for copy in catalog.disk]
        assert versions == sorted(set(versions)), "each once"
        for copy in catalog.disk:
            assert copy.done or copy.version in catalog.visible(), "it stays"
            assert copy.done or copy.retainer in ("", *(each.id for each in catalog.retainers)), "its writer lives"
        living = {each.id for each in catalog.retainers}
        for copy in before.disk if step in ("publish", "join", "leave", "die") else ():
            assert copy.done or copy.retainer not in living or copy in catalog.disk, "a living writer goes on"
        kept = {*catalog.visible()[-2:], *waiting(catalog)}
        assert set(catalog.visible()) == kept, "nothing else stays"
    assert finished == sorted(set(finished)), "none is copied again"


def test_a_second_writer_is_too_late_and_retainers_that_cannot_keep_up_leave_versions_out() -> None:
    catalog = Catalog()
    for retainer in RETAINERS[:2]:
        catalog = disk_copies.join(catalog, retainer)
    catalog = disk_copies.claim(published(catalog, 1), 1, RETAINERS[0])
    assert disk_copies.claimed(catalog, RETAINERS[0]) == (1,)
    for late in (disk_copies.claim, disk_copies.finish, disk_copies.give_up):
        assert late(catalog, 1, RETAINERS[1]) == catalog
    catalog = disk_copies.join(Catalog(), RETAINERS[0])
    for number in range(20):
        catalog = published(catalog, number)
    assert disk_copies.due(catalog) == (0, 2), "two wait for each retainer at most"
    catalog = disk_copies.finish(disk_copies.claim(catalog, 0, RETAINERS[0]), 0, RETAINERS[0])
    assert on_disk(catalog) == {0}
    assert disk_copies.due(published(catalog, 20)) == (2, 20)
    catalog = disk_copies.finish(disk_copies.claim(catalog, 2, RETAINERS[0]), 2, RETAINERS[0])
    assert on_disk(catalog) == {2}, "the newest is remembered"
    catalog = disk_copies.join(Catalog(), RETAINERS[0])
    for number in range(5):
        catalog = published(catalog, number)
    assert catalog.visible() == (0, 2, 3, 4)
    assert transitions.remove_dead_holders(catalog, {RETAINERS[0].peer}).visible() == (3, 4)
