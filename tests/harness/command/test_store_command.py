"""`holdfast store`: a store as the command shows it, while this process and others hold it."""

from __future__ import annotations

import os
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from holdfast.harness.cli import store as store_commands
from holdfast.harness.cli.store import NOTHING_TO_VERIFY, byte_progress
from holdfast.store import WeightStore
from holdfast.store.retention import DiskRetention
from support.children import Start
from support.programs import forked_programs as programs
from support.samples.store_processes import a_holder
from support.waiting import PROGRAM_SECONDS, eventually, next_line
from support.weights.layouts import as_rank

said = partial(programs.said, "store")
as_json = partial(programs.said_as_json, "store")


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"big": torch.full((300, 500), value), "step": torch.tensor(3), "half": torch.ones(7, dtype=torch.bfloat16)}


def test_ls_shows_versions_replicas_pins_and_the_memory_of_each_holder(url: str, start: Start) -> None:
    start(a_holder, url).hear()
    with WeightStore(url, limit=5 << 20) as store:
        store.publish(3, weights(3.0))
        store.publish(4, weights(4.0))
        with store.pin(3):
            found = as_json("ls", "--register", url)
            shown = said("ls", "--register", url)
    old, new = found["versions"]
    assert [(each["number"], each["latest"], each["visible"]) for each in (old, new)] == [
        (3, False, True),
        (4, True, True),
    ]
    assert new["tensors"] == 3 and new["nbytes"] > 300 * 500 * 4
    assert (new["replicas"], new["lacking"], len(new["holders"])) == (2, 0, 2)
    assert [pin["pid"] for pin in old["pins"]] == [os.getpid()] and not new["pins"]
    assert len(found["holders"]) == 2
    assert all(holder["nbytes"] == old["nbytes"] + new["nbytes"] for holder in found["holders"])
    assert {holder["pid"]: holder["limit"] for holder in found["holders"]}[os.getpid()] == 5 << 20
    for holder in found["holders"]:
        assert holder["touched"] >= holder["nbytes"] and 0 <= holder["huge"] <= holder["touched"]
    assert shown.exit_code == 0
    for words in ("of 5 MiB", "latest", "holders", "touched", str(os.getpid())):
        assert words in shown.stdout


def test_ls_shows_what_is_on_disk_of_a_store_by_its_name_in_the_register_of_the_environment(
    url: str, tmp_path: Path
) -> None:
    listed = partial(as_json, "ls", HOLDFAST_REGISTER=url)
    with WeightStore(url, name="actor", replicas=1) as store:
        with DiskRetention(store, tmp_path / "copies", every=5):
            store.publish(1, weights(1.0))
            eventually(lambda: listed("--name", "actor")["versions"][0]["disk"] == "written")
        store.publish(2, weights(2.0))
        assert [each["disk"] for each in listed("--name", "actor")["versions"]] == ["written", ""]
        assert (listed("--name", "actor")["latest"], as_json("ls", "--register", url)["latest"]) == (2, None)


def test_a_killed_holder_is_shown_as_dead_and_reported_as_unreachable(url: str, start: Start) -> None:
    holder = start(a_holder, url)
    holder.hear()
    with WeightStore(url) as store:
        store.publish(1, weights(1.0))
        store._replica_holder._deaths.close()  # no process is left that would notice the death
        holder.kill()
        found = as_json("ls", "--register", url)
        checks = as_json("verify", "latest", "--register", url, status=1)
    assert {each["pid"]: each["alive"] for each in found["holders"]} == {os.getpid(): True, holder.pid: False}
    assert found["versions"][0]["lacking"] == 1
    assert {each["pid"]: each["result"] for each in checks}[holder.pid] == "unreachable"


def test_inspect_lists_tensors_digests_values_and_ties(url: str) -> None:
    shared = torch.ones(4)
    with WeightStore(url, replicas=1) as store:
        store.publish(1, {"a": torch.zeros(4, 5)}, part=0, parts=2)
        store.publish(1, {"b": {"c": torch.zeros(6, dtype=torch.int16)}}, part=1, parts=2)
        found = as_json("inspect", "latest", "--register", url)
        shown = said("inspect", "1", "--register", url).stdout
        store.publish(2, {"head": shared, "body": shared, "step": 7, "note": "x" * 1000})
        tied = as_json("inspect", "2", "--register", url)
        tied_shown = said("inspect", "2", "--register", url).stdout
    tensors = [(each["name"], each["dtype"], each["shape"], each["part"]) for each in found["tensors"]]
    assert tensors == [("a", "float32", [4, 5], 0), ("b.c", "int16", [6], 1)]
    digests = [part["digest"] for part in found["parts"]]
    assert len(set(digests)) == 2 and all(digest in shown for digest in digests)
    assert "4 x 5" in shown
    assert tied["values"]["step"] == "7" and len(tied["values"]["note"]) < 300
    ((name, source),) = tied["tied"].items()
    assert {name, source} == {"head", "body"} and f"{source} = {name}" in tied_shown
    assert [each["name"] for each in tied["tensors"]] == [source]


def test_verify_reads_every_replica_and_finds_the_one_that_is_wrong(url: str, start: Start) -> None:
    start(a_holder, url).hear()
    with WeightStore(url) as store:
        store.publish(1, weights(1.0))
        store.publish(2, weights(2.0))
        checks = as_json("verify", "--register", url)
        assert {(each["version"], each["pid"]) for each in checks} == {
            (version, holder.pid) for version in (1, 2) for holder in store.holders(version)
        }
        assert {each["result"] for each in checks} == {"right"}
        (mine,) = (kept for (version, *_), kept in store._replica_holder._kept.items() if version == 1)
        mine.memory[1000:1004] = 99
        wrong = as_json("verify", "1", "--register", url, status=1)
        results = {each["pid"]: each["result"] for each in wrong}
        assert results.pop(os.getpid()) == "wrong" and list(results.values()) == ["right"]
        assert "1 of 4 replicas wrong" in said("verify", "--register", url).stdout


def test_an_empty_store_has_no_latest_version_and_its_verification_no_verdict(url: str) -> None:
    with WeightStore(url, replicas=1):
        for command in (("verify",), ("verify", "--json")):
            done = said(*command, url)
            assert done.exit_code == NOTHING_TO_VERIFY and "right" not in done.output
        for command in (("inspect",), ("verify", "latest"), ("export", "latest", "folder")):
            done = said(*command, url)
            assert done.exit_code == 2 and "there is no latest version: nothing is published" in done.stderr


def test_each_command_takes_the_url_as_an_argument(url: str, tmp_path: Path) -> None:
    with WeightStore(url, replicas=1) as store:
        store.publish(1, weights(1.0))
        store.publish(2, weights(2.0))
        before = store._catalog_client.read()
        assert as_json("ls", url)["url"] == url
        assert as_json("inspect", url) == as_json("inspect", "latest", url) == as_json("inspect", url, "2")
        assert as_json("verify", url) == as_json("verify", "--register", url)
        assert store._catalog_client.read() == before, "these commands change nothing and become no holder"
        done = said("rollback", url, "1")
        assert (done.exit_code, done.stdout, store.latest()) == (0, "latest is 1; it was 2\n", 1)
        assert said("export", url, "latest", tmp_path / "out").exit_code == 0
        assert said("import", tmp_path / "out", url, "--version", "3", "--replicas", "1").exit_code == 0
        assert store.versions()[-1] == 3


def test_a_register_that_does_not_exist_is_an_error_and_is_not_made(tmp_path: Path) -> None:
    for command in ("ls", "inspect 1", "verify", "rollback 1", "export 1 copy", "import copy"):
        done = said(*command.split(), "--register", f"sqlite://{tmp_path}/none.sqlite")
        assert done.exit_code == 2 and "there is no register" in done.stderr, command
    assert not list(tmp_path.iterdir())


def test_what_ranks_published_in_boxes_is_inspected_and_exported_as_one_tensor(url: str, tmp_path: Path) -> None:
    """A tensor of 4 x 5, from two ranks with two rows each."""
    rows = torch.arange(20.0).view(4, 5).split(2)
    with WeightStore(url, replicas=1) as store:
        for rank in range(2):
            with as_rank(rank, 2):
                tensor = DTensor.from_local(rows[rank], init_device_mesh("cpu", (2,)), [Shard(0)])
                store.publish(1, {"a": tensor})
        found = as_json("inspect", "1", "--register", url)
        shown = said("inspect", "1", "--register", url).stdout
        done = said("export", "1", tmp_path / "copy", "--register", url)
        assert done.exit_code == 0, done.stderr
    assert found["version"]["tensors"] == 1
    assert [each["box"] for each in found["tensors"]] == [[[0, 2], [0, 5]], [[2, 4], [0, 5]]]
    assert "4 x 5, [2:4, 0:5]" in shown
    (path,) = (tmp_path / "copy").glob("*.safetensors")
    assert torch.equal(load_file(path)["a"], torch.arange(20.0).view(4, 5))


# -- export and import


@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
def test_export_and_import_carry_a_version_to_another_store(url: str, tmp_path: Path, kind: str, start: Start) -> None:
    state = weights(3.0)
    with WeightStore(url, replicas=1) as store:
        store.publish(5, state)
        done = said("export", "latest", tmp_path / "copy", "--format", kind, "--register", url)
        assert done.exit_code == 0 and "version 5 is in" in done.stdout
    other = f"sqlite://{tmp_path}/other.sqlite"
    with WeightStore(other, replicas=1) as store:
        done = said("import", tmp_path / "copy", "--replicas", "1", "--register", other)
        assert done.exit_code == 0, done.stderr
        assert f"held by pid {os.getpid()}" in done.stdout
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        assert store.get(5, into) == 5
    assert all(torch.equal(into[name], tensor) for name, tensor in state.items())


def test_exports_imports_and_rollbacks_that_cannot_be_are_refused(url: str, tmp_path: Path) -> None:
    with WeightStore(url, replicas=1) as store:
        store.publish(5, weights(3.0))
        assert said("export", "5", tmp_path / "copy", "--register", url).exit_code == 0
        (tmp_path / "nothing").mkdir()
        for arguments, words in (
            (("export", "5", tmp_path), "exists already"),
            (("import", tmp_path / "nothing"), "neither safetensors"),
            (("import", tmp_path / "copy", "--version", "6", "--timeout", "3"), "1 of 2 processes keep part 0"),
            (("rollback", "9"), "version 9 is not in the store"),
        ):
            done = said(*arguments, "--register", url)
            assert done.exit_code == 2 and words in done.stderr
        assert store.latest() == 5


def test_serve_holds_an_imported_version_until_it_is_ended(url: str, tmp_path: Path) -> None:
    save_file(weights(2.0), tmp_path / "model.safetensors")
    arguments = ["store", "import", tmp_path, "--version", "4", "--serve", "--register", url]
    with subprocess.Popen([programs.HOLDFAST, *arguments], stdout=subprocess.PIPE, text=True) as served:
        assert next_line(served.stdout) == f"version 4 is in the store, held by pid {served.pid}\n"
        with WeightStore(url, hold=False) as reader:
            into = weights(0.0)
            assert reader.get("latest", into) == 4
        served.terminate()
        assert served.wait(PROGRAM_SECONDS) == 128 + signal.SIGTERM
    assert torch.equal(into["big"], weights(2.0)["big"])


def test_progress_is_said_when_a_command_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with byte_progress("reading model/") as progress:
        progress(1, 10)
    assert capsys.readouterr().err == "reading model/\n"
    monkeypatch.setattr(store_commands, "PATIENCE", 0.0)
    with byte_progress("reading model/") as progress:
        progress(1 << 20, 2 << 20)
    assert capsys.readouterr().err == "reading model/\nreading model/: 1 MiB of 2 MiB\n"
