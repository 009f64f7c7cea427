"""Versions as directories of safetensors: what other programs read there, and what comes back."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from holdfast.comms.errors import CorruptData, HoldfastError, Mismatch, Unsupported
from holdfast.store import NoSuchVersion, WeightStore
from holdfast.store.errors import CopyFailed
from holdfast.store.interop.disk_copy import shares
from holdfast.store.interop.safetensors import INDEX, SafetensorsDirectory, export_version, import_version
from support.children import Child
from support.mutations import mutated
from support.weights.state_dicts import content, of_many_dtypes, same


def files(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors in a directory, as the safetensors package reads them."""
    return {name: each for path in directory.glob("*.safetensors") for name, each in load_file(path).items()}


def test_safetensors_reads_what_was_exported(store: WeightStore, tmp_path: Path) -> None:
    state = of_many_dtypes()
    store.publish(3, state)
    assert export_version(store, "latest", tmp_path / "copy", shard_bytes=300_000) == 3
    found = files(tmp_path / "copy")
    assert found.keys() == state.keys()
    assert all(same(found[name], state[name]) for name in state)
    index = json.loads((tmp_path / "copy" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    assert index["weight_map"].keys() == state.keys()
    assert all(name in load_file(tmp_path / "copy" / place) for name, place in index["weight_map"].items())


def test_no_file_exceeds_the_limit_but_one_with_a_single_tensor(store: WeightStore, tmp_path: Path) -> None:
    store.publish(3, of_many_dtypes())
    export_version(store, 3, tmp_path / "copy", shard_bytes=200_000)
    shards = sorted((tmp_path / "copy").glob("*.safetensors"))
    assert [path.name for path in shards] == [
        f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)
    ]
    sizes = [sum(each.nbytes for each in load_file(path).values()) for path in shards]
    assert len(shards) > 3 and all(size <= 200_000 for size in sizes)
    export_version(store, 3, tmp_path / "small", shard_bytes=1000)
    alone = [load_file(path) for path in (tmp_path / "small").glob("*.safetensors")]
    assert all(len(each) == 1 or sum(tensor.nbytes for tensor in each.values()) <= 1000 for each in alone)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_transformers_loads_an_exported_model(store: WeightStore, tmp_path: Path, tied: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'holdfast[rl]'")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50, tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    store.publish(1, model.state_dict())
    export_version(store, 1, tmp_path / "model", shard_bytes=20_000)
    config.save_pretrained(tmp_path / "model")
    loaded, notes = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not notes["missing_keys"] and not notes["unexpected_keys"] and not notes["mismatched_keys"]
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    expected = model.state_dict()
    assert all(same(tensor, expected[name]) for name, tensor in loaded.state_dict().items())


def test_a_model_that_transformers_saved_fills_a_store(store: WeightStore, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'holdfast[rl]'")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=50
    )
    model = transformers.LlamaForCausalLM(config)
    for limit in ("10GB", "20KB"):
        model.save_pretrained(tmp_path / limit, max_shard_size=limit)
        with pytest.raises(ValueError, match="say which version"):
            import_version(store, tmp_path / limit)
    assert import_version(store, tmp_path / "10GB", 1) == 1
    assert import_version(store, tmp_path / "20KB", 2) == 2
    for version in (1, 2):
        found = content(store, version, model.state_dict())
        assert all(same(found[name], tensor) for name, tensor in model.state_dict().items())


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 1000), max_size=30), st.integers(1, 9))
def test_shares_hold_each_tensor_once_and_differ_by_no_more_than_one_tensor(sizes: dict[str, int], count: int) -> None:
    found = shares(sizes, count)
    assert sorted(name for share in found for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in found]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


def test_importing_twice_changes_nothing(store: WeightStore, other: WeightStore, tmp_path: Path) -> None:
    store.publish(3, of_many_dtypes())
    export_version(store, 3, tmp_path / "copy")
    for _ in range(2):
        assert import_version(other, tmp_path / "copy") == 3
    other.delete(3)
    other.publish(3, {"a": torch.zeros(3)})
    with pytest.raises(Mismatch):
        import_version(other, tmp_path / "copy")


# -- what is refused


def test_a_directory_that_exists_is_not_touched(store: WeightStore, tmp_path: Path) -> None:
    store.publish(3, of_many_dtypes())
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "notes.txt").write_text("keep me")
    (tmp_path / "file").touch()
    for name in ("copy", "file"):
        with pytest.raises(CopyFailed, match="exists already"):
            export_version(store, 3, tmp_path / name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["copy", "file", "notes.txt"]


def test_an_empty_directory_is_taken(store: WeightStore, tmp_path: Path) -> None:
    store.publish(3, of_many_dtypes())
    (tmp_path / "copy").mkdir()
    export_version(store, 3, tmp_path / "copy")
    assert (tmp_path / "copy" / INDEX).exists()


def test_a_dtype_that_the_format_lacks_and_a_missing_version_write_nothing(store: WeightStore, tmp_path: Path) -> None:
    store.publish(1, {"a": torch.ones(2, dtype=torch.complex128), "b": torch.ones(2)})
    with pytest.raises(Unsupported, match=r"a \(complex128\)"):
        export_version(store, 1, tmp_path / "copy")
    with pytest.raises(NoSuchVersion):
        export_version(store, 2, tmp_path / "copy")
    assert not list(tmp_path.iterdir())


def test_every_fault_of_a_directory_is_in_one_error_and_nothing_is_published(
    store: WeightStore, other: WeightStore, tmp_path: Path
) -> None:
    store.publish(3, of_many_dtypes())
    export_version(store, 3, tmp_path / "copy", shard_bytes=200_000)
    one, two, *_ = sorted((tmp_path / "copy").glob("*.safetensors"))
    one.unlink()
    two.write_bytes(two.read_bytes()[:-5])
    with pytest.raises(CorruptData) as caught:
        import_version(other, tmp_path / "copy")
    assert one.name in str(caught.value) and two.name in str(caught.value)
    assert other.versions() == []


def test_an_index_cannot_name_files_elsewhere(store: WeightStore, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / "secret.safetensors")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / INDEX).write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(CorruptData, match="outside of its directory"):
        import_version(store, tmp_path / "copy", 1)


@given(
    kind=st.sampled_from(["flip", "cut", "remove", "insert"]), where=st.integers(0, 1 << 16), what=st.integers(0, 255)
)
def test_no_mutation_of_the_json_files_raises_anything_but_our_errors(
    tmp_path_factory: pytest.TempPathFactory, kind: str, where: int, what: int
) -> None:
    directory = tmp_path_factory.getbasetemp() / "fuzzed"
    if not directory.exists():
        with WeightStore(f"memory://{directory}") as store:
            store.publish(3, {"a": torch.zeros(10), "b": torch.zeros(3)})
            export_version(store, 3, directory)
    for name in (INDEX, "holdfast.json"):
        right = (directory / name).read_bytes()
        try:
            (directory / name).write_bytes(mutated([right], kind, where, what)[0])
            with SafetensorsDirectory(directory) as found:
                assert set(found.sizes) <= {"a", "b"}
        except HoldfastError:
            pass
        finally:
            (directory / name).write_bytes(right)


# -- deaths, and memory


def killed_while_exporting(pipe: Connection, url: str, directory: Path, at: int) -> None:
    """Export version 1, and die by SIGKILL after `at` bytes."""

    def progress(done: int, total: int) -> None:
        if done >= at:
            pipe.send("dying")
            os.kill(os.getpid(), signal.SIGKILL)

    with WeightStore(url, hold=False) as store:
        export_version(store, 1, directory, shard_bytes=1 << 20, progress=progress)


@pytest.mark.parametrize("at", [1, 4_000_000], ids=["first", "last"])
def test_a_killed_export_leaves_no_version_and_the_next_one_removes_what_it_left(
    url: str, tmp_path: Path, start: Callable[..., Child], at: int
) -> None:
    state = {f"{number}": torch.randn(100_000) for number in range(10)}
    with WeightStore(url, replicas=1) as store:
        store.publish(1, state)
        child = start(killed_while_exporting, url, tmp_path / "copies" / "1", at)
        child.hear()
        os.waitpid(child.pid, 0)
        child._gone = True
        (left,) = (tmp_path / "copies").iterdir()
        assert left.name.startswith(".") and left.name.endswith(".partial")
        export_version(store, 1, tmp_path / "copies" / "1")
        assert [path.name for path in (tmp_path / "copies").iterdir()] == ["1"]
        assert all(same(tensor, state[name]) for name, tensor in files(tmp_path / "copies" / "1").items())


def peak_of_export(pipe: Connection, url: str, directory: Path) -> None:
    """Export version 1, and say by how much private memory grew meanwhile; pages of the holder do not count."""
    with WeightStore(url, hold=False) as store:
        export_version(store, 1, directory.with_name("warm"))
        before, seen, done = private_bytes(), [0], threading.Event()

        def watch() -> None:
            while not done.wait(0.001):
                seen.append(private_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        export_version(store, 1, directory)
        done.set()
        watcher.join()
        pipe.send(max(seen) - before)


def private_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def test_an_export_needs_memory_for_one_batch_only(url: str, tmp_path: Path, start: Callable[..., Child]) -> None:
    state = {f"{number}": torch.ones(2 << 20) for number in range(24)}
    with WeightStore(url, replicas=1) as store:
        store.publish(1, state)
        grown = start(peak_of_export, url, tmp_path / "copy").hear(60.0)
    assert grown < 140e6, f"{sum(each.nbytes for each in state.values())} bytes were exported"
