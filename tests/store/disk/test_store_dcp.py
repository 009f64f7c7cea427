"""Versions as directories of torch.distributed.checkpoint: plain DCP reads them, and its own fill a store."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.errors import CorruptData, HoldfastError, Unsupported
from holdfast.store import WeightStore
from holdfast.store.interop import dcp as interop
from holdfast.store.interop.dcp import DcpDirectory, export_version, import_version
from support.mutations import mutated
from support.weights.state_dicts import content, same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def weights() -> dict[str, torch.Tensor]:
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
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory), no_dist=True)
    return directory


def test_plain_dcp_reads_what_was_exported(store: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = weights()
    store.publish(3, state)
    monkeypatch.setattr(interop, "FILE_BYTES", 100)
    assert export_version(store, "latest", tmp_path / "copy") == 3
    assert len(list((tmp_path / "copy").glob("*.distcp"))) > 2
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path / "copy"), no_dist=True)
    assert all(same(into[name], state[name]) for name in state)


def test_a_checkpoint_of_dcp_fills_a_store(store: WeightStore, tmp_path: Path) -> None:
    state = weights()
    save(state, tmp_path / "theirs")
    with pytest.raises(ValueError, match="say which version"):
        import_version(store, tmp_path / "theirs")
    assert import_version(store, tmp_path / "theirs", 5) == 5
    found = content(store, 5, state)
    assert all(same(found[name], state[name]) for name in state)


def test_the_state_dict_comes_back_nested(tmp_path: Path) -> None:
    weight, bias = torch.randn(3), torch.randn(2)
    optimizer = {"lr": 0.1, "betas": (0.9, 0.99)}
    state = {"model": {"a": weight, "layers": [bias, weight]}, "step": 3, "optimizer": optimizer}
    found = DcpDirectory(save(state, tmp_path / "theirs"))
    read = found.state({name: found.read(name) for name in found.sizes}, 0, 1)
    assert read["step"] == 3 and read["optimizer"] == optimizer
    assert torch.equal(read["model"]["layers"][0], bias) and torch.equal(read["model"]["layers"][1], weight)
    assert torch.equal(read["model"]["a"], weight)


# -- what is refused


class Exploit:
    """An object that runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_a_checkpoint_cannot_run_code_by_its_metadata(store: WeightStore, tmp_path: Path) -> None:
    directory = save(weights(), tmp_path / "theirs")
    (directory / ".metadata").write_bytes(pickle.dumps(Exploit(tmp_path / "ran")))
    with pytest.raises(CorruptData, match=r"posix\.system, which DCP does not write"):
        import_version(store, directory, 1)
    assert not (tmp_path / "ran").exists() and store.versions() == []


def test_a_checkpoint_cannot_run_code_by_a_value(store: WeightStore, tmp_path: Path) -> None:
    directory = save({"a": torch.zeros(3), "value": Exploit(tmp_path / "ran")}, tmp_path / "theirs")
    with pytest.raises(Unsupported, match="'value' in"):
        import_version(store, directory, 1)
    assert not (tmp_path / "ran").exists() and store.versions() == []


def test_files_that_are_missing_or_cut_off_are_in_one_error(store: WeightStore, tmp_path: Path) -> None:
    store.publish(3, {f"{number}": torch.randn(100) for number in range(6)})
    interop_bytes, interop.FILE_BYTES = interop.FILE_BYTES, 1000
    try:
        export_version(store, 3, tmp_path / "copy")
    finally:
        interop.FILE_BYTES = interop_bytes
    one, two, *_ = sorted((tmp_path / "copy").glob("*.distcp"))
    one.unlink()
    two.write_bytes(two.read_bytes()[:-500])
    with pytest.raises(CorruptData) as caught:
        import_version(store, tmp_path / "copy", 4)
    assert one.name in str(caught.value) and two.name in str(caught.value)
    assert store.versions() == [3]


@given(st.sampled_from(["flip", "cut", "remove", "insert"]), st.integers(0, 1 << 16), st.integers(0, 255))
def test_no_mutation_of_a_checkpoint_raises_anything_but_our_errors(
    tmp_path_factory: pytest.TempPathFactory, kind: str, where: int, what: int
) -> None:
    directory = tmp_path_factory.getbasetemp() / "fuzzed dcp"
    if not directory.exists():
        save({"a": torch.zeros(10), "nested": {"b": [torch.zeros(3)], "step": 3}}, directory)
    for name in (".metadata", "__0_0.distcp"):
        right = (directory / name).read_bytes()
        try:
            (directory / name).write_bytes(mutated([right], kind, where, what)[0])
            found = DcpDirectory(directory)
            found.state({each: found.read(each) for each in found.sizes}, 0, 1)
        except HoldfastError:
            pass
        finally:
            (directory / name).write_bytes(right)
