"""The directory of a run: events, in lines that no death tears, and saved versions, evaluated and exported."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from holdfast.comms.errors import CorruptData
from holdfast.comms.transport.liveness import this_host
from holdfast.harness.cli import top_screen
from holdfast.harness.training.driver import TensorBoard
from holdfast.harness.training.live_view import LiveView
from holdfast.harness.training.report import RunFacts
from holdfast.rl.actors.service import ReplicaStatus, ServiceStatus
from holdfast.rl.config.named_code import ExtraNotInstalled, load_code
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.config.toml import parse_config, resolved
from holdfast.rl.data.episode import Group, Prompt
from holdfast.rl.data.prompts import arithmetic_held_out
from holdfast.rl.generators.models import ModelSource, save_model
from holdfast.rl.run import evaluation, run_events
from holdfast.rl.run.evaluation import BestRecord, NothingHeldOut, evaluate_source, held_out_prompts
from holdfast.rl.run.policy import policy_source, task_of
from holdfast.rl.run.run_directory import RunDirectory, RunDirectoryUnusable, RunInUse, RunStatus, read_status
from holdfast.rl.run.saved_versions import NoSavedVersion, SavedVersions
from holdfast.rl.run.telemetry import RunTelemetry
from holdfast.rl.telemetry import TrainerStatus, WorkLog, WorkReport, processor_with_descendants
from holdfast.rl.trainers.policy import build_policy, merged
from holdfast.rl.trainers.training import weights_digest
from support.children import Child
from support.rl.small_batches import episode, group_of
from support.rl.training_runs import invoke
from support.source_tree import ROOT
from support.waiting import PATIENCE, PROGRAM_SECONDS


def trained(step: int, **fields: Any) -> run_events.StepTrained:
    chosen = {"time": float(step), "reward": 0.5, "loss": 0.1, "gradient_norm": 1.0, "tokens": 128, "staleness": (0, 2)}
    return run_events.StepTrained(step=step, epoch=3, size=2, **chosen | fields)


EVENTS: tuple[run_events.Event, ...] = (
    run_events.CopiesRestored(time=0.5, versions=1),
    run_events.ProcessLost(time=1.0, name="generator-0", role="generator", pid=7, how="was ended by SIGKILL"),
    trained(2),
)


def group(number: int) -> Group:
    return group_of(*[episode(Prompt(number=number, tokens=(1, 2)), (3,))] * 2)


@given(cut=st.integers(0, 200))
def test_a_line_that_a_death_cut_off_is_dropped_and_all_others_are_kept(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    directory = RunDirectory(tmp_path_factory.mktemp("run"))
    with directory.open():
        directory.append(*EVENTS)
        directory.append_group(group(4))
    assert list(directory.groups()) == [group(4)]
    whole = directory.events_file.read_bytes()
    kept = whole[: max(0, len(whole) - cut)]
    directory.events_file.write_bytes(kept)
    lines = kept.count(b"\n")
    assert tuple(directory.events()) == EVENTS[:lines]
    with directory.open():
        directory.append(EVENTS[0])
    assert tuple(directory.events()) == (*EVENTS[:lines], EVENTS[0])


def test_a_line_that_is_no_event_is_named(tmp_path: Path) -> None:
    with RunDirectory(tmp_path).open() as directory:
        directory.append(EVENTS[0])
        directory.events_file.write_bytes(directory.events_file.read_bytes() + b'{"kind":"other","time":1}\n')
        with pytest.raises(CorruptData, match=r"events\.jsonl:2"):
            list(directory.events())


@pytest.mark.parametrize("path", ["file", "file/run", "/proc/run", "/dev/null"])
def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    said = pytest.raises(RunDirectoryUnusable, match=r"cannot be written: .*choose another directory")
    with said, RunDirectory(tmp_path / path).open():
        pass


def test_a_full_disk_ends_the_run_and_spoils_no_line(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run").open() as directory:
        directory.append(*EVENTS)
    kept = directory.events_file.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kept + 10, hard))
    try:
        with pytest.raises(RunDirectoryUnusable, match="File too large"), directory.open():
            directory.append(EVENTS[0])
        with pytest.raises(RunDirectoryUnusable, match="File too large"), directory.open():
            (tmp_path / "run" / "checkpoint").write_bytes(bytes(kept + 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with directory.open():
        directory.append(EVENTS[1])
    assert tuple(directory.events()) == (*EVENTS, EVENTS[1])


def test_one_driver_at_a_time_works_in_a_directory_and_each_session_has_a_new_folder(tmp_path: Path) -> None:
    """Whichever old ones were removed."""
    with RunDirectory(tmp_path).open(), pytest.raises(RunInUse), RunDirectory(tmp_path).open():
        pass
    with RunDirectory(tmp_path).open() as directory:
        names = [directory.new_session_logs().name for _ in range(3)]
        shutil.rmtree(directory.sessions / names[0])
        assert [*names, directory.new_session_logs().name] == ["0", "1", "2", "3"]


def test_an_activity_is_in_the_directory_before_an_observer_gets_it_unless_its_block_raises(tmp_path: Path) -> None:
    heard: list[tuple[run_events.Event, int]] = []
    with RunDirectory(tmp_path).open() as directory:
        observers = (lambda event: heard.append((event, len(list(directory.events())))),)
        telemetry = RunTelemetry(directory, observers, began=100.0)
        for number in (7, 8):
            with telemetry.doing("trainer-0", "trainer", "train", number):
                pass
        with pytest.raises(ZeroDivisionError), telemetry.doing("trainer-0", "trainer", "train", 9):
            raise ZeroDivisionError
    activities, written = zip(*heard, strict=True)
    assert [each.number for each in activities if isinstance(each, run_events.Activity)] == [7, 8] and written == (1, 2)
    for each in activities:
        assert each.seconds >= 0.0
        assert each.time >= 100.0, "a resumed run goes on at the time at which it stood"


def test_tensorboard_gets_the_scalars_of_steps_and_evaluations(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event as Record

    board = TensorBoard(tmp_path)
    board(trained(2, reward=0.25, updates=2))
    board(run_events.Evaluated(time=2.0, version=3, reward=0.75, best=True))
    board.close()
    found: dict[str, tuple[int, float]] = {}
    (file,) = tmp_path.iterdir()
    data, at = file.read_bytes(), 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        record = Record.FromString(data[at + 12 : at + 12 + length])
        at += 16 + length
        for value in record.summary.value:
            found[value.tag] = (record.step, value.simple_value)
    assert found["train/reward"] == (4, 0.25)
    assert found["train/staleness"] == (4, 2.0)
    assert found["evaluation/reward"] == (3, 0.75)


def spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_a_span_has_the_processor_time_of_its_own_thread_also_if_it_fails() -> None:
    log = WorkLog()

    def wait() -> None:
        with log.doing("publish", 3):
            other.wait(PROGRAM_SECONDS)

    other = threading.Event()
    thread = threading.Thread(target=wait)
    thread.start()
    with pytest.raises(ZeroDivisionError), log.doing("generate", 7):
        spin(0.05)
        raise ZeroDivisionError
    other.set()
    thread.join()
    spans = {span.what: span for span in log.report().spans}
    assert spans["generate"].number == 7 and spans["generate"].cpu >= 0.05
    assert spans["publish"].cpu < 0.05 <= spans["publish"].seconds, "waiting is no processor time"
    assert log.report().spans == (), "each span is reported once"


def test_the_processor_time_of_children_counts_where_they_do_the_work(start: Callable[..., Child]) -> None:
    def work(pipe: Connection) -> None:
        spin(0.3)
        pipe.send("worked")
        pipe.recv()

    before = processor_with_descendants()
    assert start(work).hear() == "worked"
    assert processor_with_descendants() - before >= 0.25


async def test_what_is_collected_becomes_events_and_a_process_that_hangs_costs_only_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, said = WorkLog(), list[int]()

    async def trainers() -> Mapping[str, WorkReport]:
        return {"trainer-0": log.report()}

    async def generators() -> Any:
        await asyncio.Event().wait()

    async def then() -> None:
        said.append(1)

    monkeypatch.setattr("holdfast.rl.run.telemetry.SECONDS", 0.05)
    with RunDirectory(tmp_path).open() as directory:
        telemetry = RunTelemetry(directory)
        telemetry.emit(run_events.ProcessStarted(time=0.0, name="trainer-0", role="trainer", pid=1))
        async with telemetry.collecting({"trainer": trainers, "generator": generators}, then):
            with log.doing("forward_backward", 1):
                spin(0.02)
        events = list(directory.events())
    [span] = [each for each in events if isinstance(each, run_events.Activity)]
    assert (span.process, span.what, span.number) == ("trainer-0", "forward_backward", 1) and span.cpu >= 0.02
    times = [each.process for each in events if isinstance(each, run_events.ProcessorTime)]
    assert times.count("driver") == times.count("trainer-0") == len(said) >= 2
    facts = RunFacts.of(events)
    [use] = [each for each in facts.processor_uses() if each.role == "trainer"]
    assert dict(use.work) == {"forward_backward": span.cpu} and use.seconds >= span.cpu
    assert [each.role for each in facts.uses()] == ["trainer"]
    share = facts.model_share()
    assert share is not None and 0 < share <= 1


async def test_a_directory_that_takes_no_more_is_told_while_the_run_waits_for_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def then() -> None:
        if (tmp_path / "events.jsonl").exists():
            (tmp_path / "events.jsonl").unlink()
            (tmp_path / "events.jsonl").mkdir()

    monkeypatch.setattr("holdfast.rl.run.telemetry.EVERY", 0.01)
    with RunDirectory(tmp_path).open() as directory, pytest.raises(RunDirectoryUnusable):
        async with asyncio.timeout(10.0), RunTelemetry(directory).collecting({}, then):
            await asyncio.Event().wait()


def status_of(*pids: int, **fields: Any) -> RunStatus:
    """The status of a run with trainers of these processes, and a replica in the first of them."""
    replica = ReplicaStatus(
        name="generator-4", slot=0, host="", pid=pids[0] if pids else 0, health="ready", load=2, restarts=3
    )
    service = ServiceStatus(
        name="generator", version=6, replicas=(replica,), queued=5, calls=90, retried=4, overloaded=0, lost=3
    )
    trainers = {
        f"trainer-{n}": TrainerStatus(pid=p, rank=n, epoch=2, committed=6, newest_batch=7) for n, p in enumerate(pids)
    }
    given = {"time": time.time(), "driver": 1, "step": 6, "steps": 40, "trainers": trainers, "services": (service,)}
    return RunStatus(**given | fields)


def test_top_shows_trainers_and_replicas_and_a_driver_that_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_screen, "OLD", PATIENCE)
    first, second = status_of(9, 9).trainers.values()
    trainers = {"trainer-0": first, "trainer-1": msgspec.structs.replace(second, rank=None)}
    for age, ended, words in ((0.0, False, "running"), (60.0, False, "last heard 1 min"), (60.0, True, "ended")):
        RunDirectory(tmp_path).write_status(status_of(9, time=time.time() - age, ended=ended, trainers=trainers))
        shown = invoke("top", tmp_path, "--once")
        assert shown.exit_code == 0 and words in shown.output
        for part in ("step 6 of 40", "rank 0, epoch 2", "spare", "generator-4", "5 queued", "3 replicas lost"):
            assert part in shown.output
    assert '"restarts": 3' in invoke("top", tmp_path, "--json").output


def test_top_looks_at_each_process_of_a_run_whose_driver_has_ended(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait(PATIENCE)
    RunDirectory(tmp_path).write_status(status_of(dead.pid, os.getpid(), driver=dead.pid, host=this_host()))
    lines = invoke("top", tmp_path, "--once").output.splitlines()
    names = ("driver", "trainer-0", "trainer-1", "generator-4")
    said = {name: next(line for line in lines if name in line) for name in names}
    assert f"its driver (pid {dead.pid}) has ended; holdfast rl resume" in said["driver"]
    assert "ended" in said["trainer-0"] and "ended" in said["generator-4"] and "ready" not in said["generator-4"]
    assert "rank 1, epoch 2" in said["trainer-1"]


def test_a_process_that_began_after_the_status_is_another_one_with_its_id(tmp_path: Path) -> None:
    status = status_of(time=time.time() - 3600 * 24 * 365, driver=os.getpid(), host=this_host(), services=())
    RunDirectory(tmp_path).write_status(status)
    read = read_status(RunDirectory(tmp_path).status_file)
    assert read is not None and read.gone == (os.getpid(),)


def test_the_lines_of_a_run_have_one_clock_that_never_runs_backwards() -> None:
    """Events of other processes come late, and those of a resumed run count from its first start."""
    console = Console(file=io.StringIO(), width=200)
    with LiveView(console, 40) as view:
        view.begin("starting")
        view(run_events.RunResumed(time=125.0, step=12))
        view(run_events.ProcessStarted(time=128.0, name="trainer-0", role="trainer", pid=1, seconds=3.0))
        view(run_events.ProcessStarted(time=115.0, name="generator-0", role="generator", pid=2, seconds=1.0))
        view.note("SIGKILL")
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    times = [float(line.split(" s ")[0]) for line in lines]
    assert times == sorted(times) and times[-1] < 60.0
    assert "times count from this start, the run had lasted 2 min 5 s before it" in lines[1]


def test_the_line_of_a_run_counts_every_update_of_a_batch() -> None:
    console = Console(file=io.StringIO(), width=200)
    with LiveView(console, 8) as view:
        for step in range(0, 8, 2):
            view(trained(step, staleness=(0,), updates=2))
        assert view.done == 8
        assert view.figures() == "reward 0.50, 1.0 steps/s"


EXPORT = ROOT / "examples" / "stack" / "executorch" / "export.py"
executorch: Any = sys.modules[load_code(f"{EXPORT}:export").__module__]
"""The example that exports a program of ExecuTorch, as `holdfast rl export --to FILE.py:NAME` loads it."""

greedy: Any = load_code(f"{EXPORT.with_name('program.py')}:greedy")

CONFIG = parse_config("[sampling]\nmax_new_tokens = 2", "test")
SOURCE = policy_source(CONFIG)
PROMPTS = held_out_prompts(CONFIG, task_of(CONFIG), 12)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that has hardly begun: it has version 0."""
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "config.toml").write_text(resolved(CONFIG))
    return directory


def test_a_folder_is_loaded_by_transformers_with_the_same_bits(run: Path, tmp_path: Path) -> None:
    command = ["rl", "export", run, tmp_path / "out", "--version", "0"]
    assert invoke(*command).exit_code == 0
    loaded = AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"))
    assert weights_digest(loaded.state_dict()) == weights_digest(SOURCE.build().state_dict())
    again = invoke(*command)
    assert again.exit_code == 2 and "exists already" in again.output


def test_a_file_has_all_weights_and_says_where_they_are_from(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    assert invoke("rl", "export", run, "--version", "latest", "--to", "safetensors", out).exit_code == 0
    model = SOURCE.build()
    with safe_open(out, framework="pt") as file:
        assert file.metadata()["version"] == "0"
        assert file.metadata()["digest"] == weights_digest(model.state_dict())
        assert {name: file.get_tensor(name).tolist() for name in file.keys()} == {  # noqa: SIM118
            name: tensor.tolist() for name, tensor in model.state_dict().items()
        }


def test_a_function_of_the_users_exports_too(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def names(config, source, out):\n"
        "    out.write_text('\\n'.join(source.build().state_dict()))\n"
        "    return f'{config.steps} steps'\n"
    )
    out = tmp_path / "names.txt"
    done = invoke("rl", "export", run, "--version", "0", "--to", f"{tmp_path / 'mine.py'}:names", out)
    assert done.exit_code == 0 and done.output.strip().endswith(f"{CONFIG.steps} steps")
    assert out.read_text().splitlines() == list(SOURCE.build().state_dict())
    absent = invoke("rl", "export", run, "--version", "0", "--to", "executorch", out)
    assert absent.exit_code == 2 and "write FILE.py:NAME" in absent.output


def test_without_its_environment_a_program_is_refused_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(ExtraNotInstalled, match="make extra-executorch"):
        executorch.export_program(SOURCE, PROMPTS, CONFIG.sampling, tmp_path / "model.pte")


@pytest.mark.parametrize(
    ("difference", "different", "words"),
    [(3e-6, (), r"logits differ .* by 3e-06, more than 1e-06"), (1e-7, (4, 7), r"2 prompts of 12 otherwise")],
)
def test_a_program_that_differs_from_the_model_is_refused_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, difference: float, different: tuple[int, ...], words: str
) -> None:
    def differs(python: Path, job: Any, scratch: Path, out: Path) -> Any:
        Path(job["draft"]).write_bytes(b"a program")
        assert len(job["answers"]) == len(job["prompts"]) == 12 and all(len(each) == 2 for each in job["answers"])
        return executorch.ExecutorchReport(
            nbytes=9, difference=difference, allowed=1e-6, different=different, delegated=1.0
        )

    monkeypatch.setattr(executorch, "extra_python", lambda _: Path(sys.executable))
    monkeypatch.setattr(executorch, "_run", differs)
    with pytest.raises(executorch.ExportRefused, match=words):
        executorch.export_program(SOURCE, PROMPTS, CONFIG.sampling, tmp_path / "model.pte")
    assert not list(tmp_path.iterdir())


@given(
    prompt=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    most=st.integers(1, 6),
    stop=st.sets(st.integers(0, 6), max_size=2),
)
def test_the_greedy_loop_ends_at_the_first_stop_token(prompt: list[int], most: int, stop: set[int]) -> None:
    """The model here says the last token plus the number of tokens so far."""

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        following = int(tokens[0, -1] + tokens.shape[1]) % 7
        return torch.nn.functional.one_hot(torch.tensor([[following] * tokens.shape[1]]), 7)

    said = greedy(logits, prompt, most, tuple(stop))
    assert 1 <= len(said) <= most and not set(said[:-1]) & stop
    assert len(said) == most or said[-1] in stop


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_program_of_executorch_answers_as_the_model(tmp_path: Path) -> None:
    if not (ROOT / ".venv" / "extras" / "executorch" / "bin" / "python").exists():
        pytest.skip("executorch is not installed: make extra-executorch")
    source = msgspec.structs.replace(SOURCE, config={**SOURCE.config, "num_hidden_layers": 1})
    report = executorch.export_program(source, PROMPTS, CONFIG.sampling, tmp_path / "model.pte")
    assert report.difference <= report.allowed and not report.different and report.delegated > 0
    assert (tmp_path / "model.pte").stat().st_size == report.nbytes


ADAPTERS = '[model]\nlora_rank = 2\nlora_targets = ["q_proj", "v_proj"]\n'
LORA = parse_config(ADAPTERS + "[sampling]\nmax_new_tokens = 2", "test")


def a_run(path: Path, config: RunConfig) -> tuple[RunDirectory, dict[int, str]]:
    """The directory of a run with checkpoints of versions 2 and 4; returns the digests of their weights too."""
    directory, digests = RunDirectory(path), {}
    directory.path.mkdir(exist_ok=True)
    directory.config_file.write_text(resolved(config))
    for version in (2, 4):
        policy = build_policy(policy_source(config), config.model)
        with torch.no_grad():
            for each in policy.parameters():
                if each.requires_grad:
                    each.add_(torch.full_like(each, 0.01 * version))
        state = {f"policy.{name}": tensor for name, tensor in policy.state_dict().items()}
        dcp.save(state, checkpoint_id=directory.checkpoints / f"step-{version:09d}", no_dist=True)
        digests[version] = weights_digest(merged(policy) if config.model.lora_rank else policy.state_dict())
    return directory, digests


@pytest.mark.parametrize(("config", "other"), [(CONFIG, LORA), (LORA, CONFIG)], ids=["all weights", "adapters"])
def test_a_checkpoint_has_the_weights_that_its_trainers_published_and_fits_no_other_model(
    tmp_path: Path, config: RunConfig, other: RunConfig
) -> None:
    directory, digests = a_run(tmp_path, config)
    saved = SavedVersions(config, directory)
    assert saved.numbers == (0, 2, 4) and saved.find("latest") == 4 and saved.best is None
    assert {each: weights_digest(saved.model(each).state_dict()) for each in (2, 4)} == digests
    first, second = (saved.model(each).state_dict() for each in (0, 2))
    assert weights_digest(first) == weights_digest(policy_source(config).build().state_dict())
    changed = {name.rsplit(".", 2)[-2] for name in first if not first[name].equal(second[name])}
    assert config is CONFIG or changed == {"q_proj", "v_proj"}, "the layers that have adapters, and no other"
    assert weights_digest(saved.source(2, tmp_path / "scratch").build().state_dict()) == digests[2]
    with pytest.raises(CorruptData, match="step-000000002 does not fit the model"):
        SavedVersions(other, directory).model(2)


def test_versions_are_found_by_number_or_record_and_one_that_is_not_there_is_refused(tmp_path: Path) -> None:
    directory, _ = a_run(tmp_path, CONFIG)
    for version in ("3", "best", "-1", "newest", ""):
        with pytest.raises(NoSavedVersion, match="on disk are 0, 2, 4, and no version was evaluated yet"):
            SavedVersions(CONFIG, directory).find(version)
    model = ModelSource(config=policy_source(CONFIG).config, seed=5).build()
    save_model(model, directory.best / "version-3")
    record = BestRecord(version=3, reward=0.25, folder="version-3")
    (directory.best / "best.json").write_bytes(msgspec.json.encode(record))
    saved = SavedVersions(CONFIG, directory)
    assert saved.numbers == (0, 2, 3, 4) and saved.find("best") == 3
    assert weights_digest(saved.model(3).state_dict()) == weights_digest(model.state_dict())


def test_an_evaluation_scores_every_prompt_once_whatever_the_size_of_a_batch() -> None:
    """A model's answers do not depend on the prompts beside them."""
    found = []
    for batch in (1, 5, 32):
        sampling = msgspec.structs.replace(CONFIG.sampling, batch=batch, group=2)
        config = msgspec.structs.replace(CONFIG, sampling=sampling)
        result = asyncio.run(evaluate_source(config, policy_source(config), 23))
        assert [each.prompt for each in result.answers] == [task_of(config).held_out.prompt(n).text for n in range(23)]  # type: ignore[union-attr]
        assert result.tokens == 46 and result.reward == sum(each.reward for each in result.answers) / 23
        found.append([each.answer for each in result.answers])
    assert found[0] == found[1] == found[2]


def test_without_held_out_prompts_there_is_nothing_to_evaluate(monkeypatch: pytest.MonkeyPatch) -> None:
    task = dataclasses.replace(task_of(CONFIG), held_out=None)
    monkeypatch.setattr(evaluation, "task_of", lambda config: task)
    with pytest.raises(NothingHeldOut, match=r"data\.held_out"):
        asyncio.run(evaluate_source(CONFIG, policy_source(CONFIG)))


def test_the_command_shows_score_and_answers_or_all_of_it_as_json(tmp_path: Path) -> None:
    a_run(tmp_path, CONFIG)
    command = ["rl", "eval", tmp_path, "--version", "2", "--prompts", "9"]
    shown = invoke(*command)
    assert shown.exit_code == 0 and "version 2 of" in shown.output and "9 held-out prompts" in shown.output
    answers = msgspec.json.decode(invoke(*command, "--json").output)["result"]["answers"]
    assert {each["reference"] for each in answers} <= {each.answer for each in arithmetic_held_out()}
