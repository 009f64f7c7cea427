"""Versions on disk in both formats: what comes back of a state dict, and which directories and disks are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as plain_dcp
from safetensors.torch import load_file
from torch import nn

from holdfast.comms.errors import CorruptData, Unsupported
from holdfast.harness.chaos.faults.storage import small_disk
from holdfast.store import WeightStore
from holdfast.store.errors import CopyFailed, NoRoomOnDisk
from holdfast.store.interop import dcp, import_version, safetensors
from support.weights.state_dicts import content, of_many_dtypes, same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

EXPORTS = {"safetensors": safetensors.export_version, "dcp": dcp.export_version}


@pytest.fixture(params=sorted(EXPORTS))
def export_version(request: pytest.FixtureRequest) -> Callable[..., int]:
    return EXPORTS[request.param]


class Tied(nn.Module):
    """A model with its head tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight


def training_state() -> dict[str, Any]:
    """A model with a tied weight, its optimizer after a step, and values of several types."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model.head(model.layers[0](model.embedding(torch.arange(5)))).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 7,
        "notes": {"name": "run", "betas": (0.9, 0.99), "empty": [], "none": None, "dtype": torch.bfloat16},
    }


def equal(one: Any, other: Any) -> bool:
    """Whether two state dicts are equal, to the bits and types."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict) and one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return bool(type(one) is type(other) and one == other)


def digests(store: WeightStore, version: int) -> list[str]:
    return [part.digest for part in store.inspect().content(version).parts]


def test_a_training_state_comes_back_as_it_was(
    store: WeightStore, other: WeightStore, tmp_path: Path, export_version: Callable[..., int]
) -> None:
    state = training_state()
    store.publish(1, state)
    export_version(store, 1, tmp_path / "copy")
    assert import_version(other, tmp_path / "copy") == 1
    found = other.load(1)
    assert equal(found, {**state, "model": dict(state["model"])})
    assert found["model"]["head.weight"] is found["model"]["embedding.weight"]
    assert digests(other, 1) == digests(store, 1), "the same version, for every process of both stores"


def test_tensors_of_many_dtypes_come_back_bit_by_bit(
    store: WeightStore, other: WeightStore, tmp_path: Path, export_version: Callable[..., int]
) -> None:
    state = of_many_dtypes()
    store.publish(3, state)
    export_version(store, 3, tmp_path / "copy")
    assert import_version(other, tmp_path / "copy") == 3
    found = content(other, 3, state)
    assert all(same(found[name], state[name]) for name in state)


def test_parameters_come_back_as_parameters(
    store: WeightStore, other: WeightStore, tmp_path: Path, export_version: Callable[..., int]
) -> None:
    store.publish(1, {"a": nn.Parameter(torch.randn(3)), "b": nn.Parameter(torch.arange(3), requires_grad=False)})
    export_version(store, 1, tmp_path / "copy")
    import_version(other, tmp_path / "copy")
    found = other.load(1)
    assert isinstance(found["a"], nn.Parameter) and found["a"].requires_grad
    assert isinstance(found["b"], nn.Parameter) and not found["b"].requires_grad


def test_tied_tensors_are_in_the_files_once(store: WeightStore, tmp_path: Path) -> None:
    store.publish(1, Tied().state_dict())
    safetensors.export_version(store, 1, tmp_path / "copy")
    names = [name for path in (tmp_path / "copy").glob("*.safetensors") for name in load_file(path)]
    assert len([name for name in names if name in ("embedding.weight", "head.weight")]) == 1


def test_shares_of_a_training_state_fill_what_the_whole_would(
    store: WeightStore, other: WeightStore, tmp_path: Path, export_version: Callable[..., int]
) -> None:
    state = training_state()
    store.publish(1, state)
    export_version(store, 1, tmp_path / "copy")
    for part in range(3):
        assert other.versions() == []
        import_version(other, tmp_path / "copy", part=part, parts=3)
    into = training_state()
    for tensor in (*into["model"].values(), *into["optimizer"]["state"][0].values()):
        tensor.zero_()
    into["step"] = 0
    assert other.get(1, into) == 1
    assert equal(into, state)


def test_plain_dcp_loads_a_nested_state(store: WeightStore, tmp_path: Path) -> None:
    state = training_state()
    store.publish(1, state)
    dcp.export_version(store, 1, tmp_path / "copy")
    into = training_state()
    for tensor in (*into["model"].values(), *into["optimizer"]["state"][0].values()):
        tensor.zero_()
    into["step"] = 0
    plain_dcp.load(into, storage_reader=plain_dcp.FileSystemReader(tmp_path / "copy"), no_dist=True)
    assert equal(into, state)


def test_tensors_in_tuples_are_found_by_plain_dcp_by_their_names(store: WeightStore, tmp_path: Path) -> None:
    pair = torch.randn(3), torch.randn(4)
    store.publish(1, {"pair": pair, "step": 3})
    dcp.export_version(store, 1, tmp_path / "copy")
    into = {"pair.0": torch.zeros(3), "pair.1": torch.zeros(4), "step": 0}
    plain_dcp.load(into, storage_reader=plain_dcp.FileSystemReader(tmp_path / "copy"), no_dist=True)
    assert torch.equal(into["pair.0"], pair[0]) and torch.equal(into["pair.1"], pair[1])  # type: ignore[arg-type]
    assert into["step"] == 3


# -- what is refused, in both formats


def test_a_full_disk_is_a_typed_error_and_leaves_nothing(
    store: WeightStore, tmp_path: Path, export_version: Callable[..., int]
) -> None:
    store.publish(1, {"a": torch.ones(500_000)})
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        for megabytes in (1.0, 2.0, 2.004):  # the last two have room for the tensor, but not for all beside it
            with small_disk(disk, megabytes):
                with pytest.raises(NoRoomOnDisk, match="2000000 bytes" if megabytes == 1.0 else None):
                    export_version(store, 1, disk / "copy")
                assert not list(disk.iterdir())
    except Unsupported as error:
        pytest.skip(str(error))


def test_a_changed_byte_is_found_by_the_checksum_of_its_tensor(
    store: WeightStore, other: WeightStore, tmp_path: Path, export_version: Callable[..., int]
) -> None:
    store.publish(3, {"a": torch.full((1000,), 3.0)})
    export_version(store, 3, tmp_path / "copy")
    (path,) = (each for each in (tmp_path / "copy").iterdir() if each.suffix in (".safetensors", ".distcp"))
    data = bytearray(path.read_bytes())
    data[data.index(torch.full((100,), 3.0).numpy().tobytes()) + 20] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptData, match="other bytes than were exported, in a"):
        import_version(other, tmp_path / "copy")
    assert other.versions() == []


@pytest.mark.parametrize("import_copy", [safetensors.import_version, dcp.import_version])
def test_a_directory_without_weights_is_an_error(
    store: WeightStore, tmp_path: Path, import_copy: Callable[..., int]
) -> None:
    for directory in (tmp_path, tmp_path / "none"):
        with pytest.raises(CopyFailed):
            import_copy(store, directory, 1)
