"""The `holdfast` command, called in a process of its own, or in this process where only its output matters."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer

from holdfast.ft.launch.launcher import StartFailed
from holdfast.ft.launch.local_launcher import Grace, LaunchPlan, launch, python_command
from holdfast.harness import command_line
from holdfast.harness.cli.app import app
from holdfast.harness.training.driver import run_until_signalled
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.run_events import ProcessStarted
from support.programs.forked_programs import (
    HOLDFAST,
    run_holdfast,
    run_python,
    said,
    said_as_json,
    script,
    write_plugins,
)
from support.programs.snippets import blocks
from support.source_tree import ROOT
from support.waiting import PROGRAM_SECONDS, becomes_true, next_line

COMMANDS = typer.main.get_group(app)


def holdfast(*arguments: str | Path, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command with wide output and without colours."""
    wide = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **environ}
    return run_holdfast(*arguments, cwd=cwd, environ=wide)


def test_the_command_is_a_module_to_run(tmp_path: Path) -> None:
    assert run_python("-m", "holdfast", "--version", cwd=tmp_path) == "holdfast 0.1.0\n"


def _commands(group: typer.core.TyperGroup, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if isinstance(command, typer.core.TyperGroup):
            yield from _commands(command, (*above, name))
        else:
            yield (*above, name)


def _documented() -> Iterator[tuple[str, list[str]]]:
    """Where each `holdfast ...` of a shell block, of help, of the figures and of the Makefile stands; its arguments."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = [(page.name, block.text) for page in pages for block in blocks(page) if block.language == "bash"]
    texts += [(" ".join(command), inspect.getdoc(_found(command).callback) or "") for command in _commands(COMMANDS)]
    figures = re.sub(r"\s+|[][]", " ", (ROOT / "docs/performance.md").read_text()).replace(" OP ", " all_reduce ")
    texts += [("performance.md", line) for line in re.findall(r"`[^`]*?(holdfast [^`]* -[^`]*)`", figures)]
    texts.append(("Makefile", (ROOT / "Makefile").read_text().replace("$(BIN)/", "")))
    for where, text in texts:
        for line in text.replace("\\\n", " ").splitlines():
            if match := re.match(r"\s*(?:[A-Z_]+=\S+ )*holdfast (.*)", line):
                words = shlex.split(
                    re.sub(r"\$\(if .*\)|\$(?=\w)", "", re.sub(r"\$\(\w+\)", "value", match[1])), comments=True
                )
                ends = (number for number, word in enumerate(words) if word in ("|", "||", "&&", "&", ";", ">", "2>"))
                yield where, words[: next(ends, len(words))]


def _found(command: tuple[str, ...]) -> Any:
    found: Any = COMMANDS
    for name in command:
        found = found.commands[name]
    return found


def test_every_documented_command_has_the_options_that_it_is_shown_with() -> None:
    wrong, count = [], 0
    for where, words in _documented():
        context, group, rest = typer.Context(COMMANDS, info_name="holdfast"), COMMANDS, list(words)
        try:
            while isinstance(group, typer.core.TyperGroup) and rest and not rest[0].startswith("-"):
                name, found, rest = group.resolve_command(context, rest)
                if isinstance(found, typer.core.TyperGroup):
                    context = typer.Context(found, parent=context, info_name=name)
                else:
                    found.make_context(name, list(rest), parent=context)
                group = found
        except typer.Exit:
            pass
        except Exception as error:
            wrong.append(f"{where}: holdfast {' '.join(words)}: {error}")
        count += 1
    assert not wrong, "\n".join(wrong)
    assert count > 100


@pytest.mark.parametrize("command", list(_commands(COMMANDS)), ids=" ".join)
def test_each_command_has_examples_and_is_guarded(command: tuple[str, ...]) -> None:
    assert isinstance(_found(command), command_line.GuardedCommand)
    done = said(*command, "--help")
    assert done.exit_code == 0
    assert f"holdfast {' '.join(command)}" in done.stdout.partition("Examples")[2]
    assert "[bold]" not in done.stdout
    assert "pip install 'holdfast'" not in done.stdout, "the brackets of an extra are no markup"


REFUSED = {
    "fly": "No such command",
    "run nothing.py": "there is no file",
    "run --logs /dev/null/logs examples/train.py": "Not a directory",
    "run --backend carrier-pigeon examples/train.py": "known are",
    "run -n 0 examples/train.py": "greater than or equal to 1",
    "run --spares -1 examples/train.py": "greater than or equal to 0",
    "conformance --backend telepathy": "unknown",
    "chaos run no-such-scenario": "there are bad-network",
    "chaos run kill-rank --minutes nan": "--minutes",
    "chaos run kill-rank --report /dev/null/report": "/dev/null",
    "chaos compare before after": "No such file or directory",
    "chaos compare before after --report /dev/null/report": "/dev/null",
    "demo --report /dev/null/report": "/dev/null",
    "demo --backend gloo": "give --hosts too",
    "gate nosuch": "nosuch is neither a commit",
    "gate --effect inf": "--effect",
    "new-plugin shm --directory /dev/null/new": "there is a backend shm already",
    "new-plugin registers --directory /dev/null/new": "there is a plugin registers already",
    "new-plugin Mine --directory /dev/null/new": "'Mine' is no identifier of lower-case letters",
    "new-plugin ../mine --directory /dev/null/new": "no identifier",
    "new-plugin class --directory /dev/null/new": "no identifier",
    "bench copy --plot picture.xyz": "does not say what to write",
    "bench copy --plot no/such/folder.png": "there is no folder",
    "bench copy --plot /dev/null/plot.png": "/dev/null",
    "bench copy --report /dev/null/report": "/dev/null",
    "chaos compare before after --report new/folder": "No such file or directory",
    "bench all_reduce --sizes many": "Usage",
    "bench all_reduce -n 1": "Usage",
    "bench all_reduce --dtype float3": "Usage",
    "bench all_reduce --peer nosuch": "Usage",
    "bench all_reduce --backends=": "--backends '' names nothing: give one or several, such as shm,gloo",
    "bench all_reduce --peer=": "--peer '' names nothing: give one or several, such as torch-gloo",
    "bench put --fresh": "Usage",
    "bench recovery --together 4": "Usage",
    "bench recovery --proposer --spares 2": "Usage",
    "bench recovery --size big": "Usage",
    "bench store --peers redis": "torchstore, memcpy",
    "bench store --workloads x": "small",
    "bench store --workloads ,": "--workloads ',' names nothing: give one or several, such as",
    "bench store --size x": "64K",
    "bench store --device tpu": "known: cpu, cuda",
    "rl environment serve chess": "there are arithmetic, guess",
    "rl resume nothing": "holds no run",
    "rl report nothing": "holds no run",
    "simulate --shrink --out /dev/null/failing.json": "/dev/null",
    "simulate --trace /dev/null/trace": "/dev/null",
    "simulate --scenario flood": "no scenario 'flood'",
    "simulate --bug none": "no bug 'none'",
    "simulate --schedule nowhere.json": "No such file or directory",
    "simulate --ranks 4 --hosts 9 --scenario crash": "need 1 <= racks <= hosts <= ranks",
    "simulate --hosts 3": "--hosts needs --ranks",
    "simulate --compare --ranks 1": "--compare needs 2 ranks or more: one is struck, and others have to go on",
    "simulate --ranks 1000 --shrink": "it takes at most 256 ranks",
    "store ls": "name the store by its register's URL",
    "store ls sqlite:///a sqlite:///b": "one store at a time",
    "store ls sqlite:///a --register sqlite:///b": "name the store once",
    "store ls --register memory://x": "inside one process",
    "store ls --register nosuch://x": "known are",
    "store ls --job nosuch": "no job of that name",
    "store export 1 x --format zip --register sqlite:///x": "'zip' is not one of",
    "store inspect seven --register sqlite:///x": "neither a version's number",
    "store inspect -1 --register sqlite:///x": "No such option",
    "tune --backend ,": "--backend ',' names nothing: give one or several, such as ucx,mpi",
    "tune --show --forget": "Usage",
    "tune --show --backend ucx": "Usage",
}
"""Commands that cannot be done, and words of what they say."""


@pytest.mark.parametrize(("command", "words"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_done_is_said_before_anything_starts_or_is_written(
    command: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (".git", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    done = said(*command.split())
    assert {each.name for each in tmp_path.iterdir()} == {".git", "examples"}
    assert done.exit_code == command_line.CANNOT_BEGIN
    assert words in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


def test_a_conformance_run_without_a_check_fails() -> None:
    done = holdfast("conformance", "--backend", "inproc", "-k", "matches_nothing")
    assert done.returncode == 2
    assert "no check could run" in done.stderr


def test_an_unwritable_trace_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    done = said("blame", tmp_path, "--perfetto", tmp_path / "no" / "trace.json")
    assert done.exit_code == 1
    assert done.stderr.startswith("holdfast blame: the trace cannot be written")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("a fault of ours"), command_line.INTERNAL_ERROR),
        (OSError(28, "No space left on device"), command_line.INTERNAL_ERROR),
        (StartFailed("the zygote died"), command_line.CANNOT_BEGIN),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_unexpected_exception_ends_without_a_verdict(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("holdfast.harness.bench.run.run", fail)
    done = said("bench", "copy")
    assert done.exit_code == status
    assert str(error) in done.stderr
    assert ("Traceback" in done.stderr) == (status == command_line.INTERNAL_ERROR)


def test_trying_an_output_leaves_no_file_and_removes_none(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("kept")
    for name in ("old", "new"):
        command_line.check_file(tmp_path / name, "--out")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old", "kept")]


@pytest.mark.parametrize("options", [[], pytest.param(["--json"], marks=pytest.mark.thorough)], ids=["table", "json"])
def test_a_closed_pipe_has_a_status_of_its_own(options: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [HOLDFAST, "backends", *options]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=PROGRAM_SECONDS)
    os.close(writing)
    assert done.returncode == command_line.BROKEN_PIPE
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command", ["bench barrier --backends", "bench recovery --kills 1 --backend", "tune --backend"]
)
def test_a_backend_that_cannot_run_fails_the_command(command: str) -> None:
    done = said(*command.split(), "nosuch")
    assert done.exit_code == 1
    assert re.search("nosuch.*(is not available|unknown)|unknown.*nosuch", " ".join(done.output.split()))


def test_backends_says_which_can_run_here_what_a_launcher_can_start_and_which_hints_there_are() -> None:
    done = said("backends")
    assert done.exit_code == 0
    rows = {row.split()[1]: row for row in done.stdout.splitlines() if row.startswith("│") and row[2] != " "}
    assert set(rows) >= {"gloo", "inproc", "shm"}
    assert all(rows[name].split()[3] == "yes" for name in ("gloo", "inproc", "shm"))
    assert re.search(r"│ mpi +│ by\b.*\n│ +│ launcher", done.output)
    found = said_as_json("backends")
    assert found["broken"] == {}
    assert [name for name, backend in found["backends"].items() if backend["by_launcher"]] == ["mpi"]
    shm = found["backends"]["shm"]
    assert shm["available"] is True
    assert "all_reduce" in shm["capabilities"]["collectives"]
    assert "float32" in shm["capabilities"]["reduces"]["cpu"]
    assert shm["capabilities"]["one_host"] is True
    assert "threads │ an integer from 1 to 64 │ 2" in " ".join(said("backends", "--hints").stdout.split())
    hint = found["backends"]["gloo"]["hints"]["threads"]
    assert (hint["type"], hint["default"], hint["per_op"]) == ("int", 2, False)
    assert hint["values"] == "an integer from 1 to 64" and hint["description"]


PLUGINS = {
    "broken": "raise RuntimeError('cannot work')",
    "warp": """
        from holdfast.comms.plugins.spec import API_VERSION, BackendInfo, Capabilities, Unavailable, hookimpl

        @hookimpl
        def holdfast_backends():
            probe = lambda: Unavailable("the card is not there", "buy one")
            return [BackendInfo("warp", API_VERSION, "faster than light", Capabilities(), probe, lambda context: None)]
    """,
}


def test_plugins_that_do_not_load_or_cannot_run_here_say_why_and_harm_no_other(tmp_path: Path) -> None:
    write_plugins(tmp_path, **PLUGINS)
    shown, told = (holdfast("backends", *options, PYTHONPATH=str(tmp_path)) for options in ((), ("--json",)))
    assert shown.returncode == told.returncode == 0
    for words in ("its plugin does not load: RuntimeError: cannot work", "the card is not there", "buy one"):
        assert words in shown.stdout
    described = json.loads(told.stdout)
    assert described["broken"] == {"broken": "RuntimeError: cannot work"}
    assert described["backends"]["shm"]["available"] is True
    warp = described["backends"]["warp"]
    assert (warp["available"], warp["reason"], warp["install_hint"]) == (False, "the card is not there", "buy one")


# -- run: scripts that do not join


def test_run_says_that_no_process_joined_where_that_was_asked_for(tmp_path: Path) -> None:
    """That is no failure: scripts of torch.distributed do not join."""
    done = holdfast("run", "-n", "2", "--min-size", "1", script(tmp_path, "print('I have work of my own')"))
    assert done.returncode == 0
    lines = sorted(line for line in done.stdout.splitlines() if "work" in line)
    assert lines == [f"[{n}] I have work of my own" for n in range(2)]
    assert "no process joined the job" in done.stdout


TORCH_SCRIPT = """
import torch, torch.distributed as dist, holdfast.comms.torchdist

dist.init_process_group("holdfast")
x = torch.ones(3) * (dist.get_rank() + 1)
dist.all_reduce(x)
group = dist.new_group([0, 1])
dist.barrier(group)
print("sum", x.tolist(), group.communicator.backend)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("backend", ["shm", pytest.param("mpi", marks=pytest.mark.thorough)])
def test_run_starts_a_script_of_torch_distributed_unchanged(tmp_path: Path, backend: str) -> None:
    done = holdfast("run", "-n", "2", "--backend", backend, script(tmp_path, TORCH_SCRIPT))
    assert done.returncode == 0, done.stdout
    for rank in range(2):
        assert f"[{rank}] sum [3.0, 3.0, 3.0] {backend}" in done.stdout
    assert "no process joined the job" not in done.stdout


def test_run_gives_the_environment_contract_and_arguments_and_fails_if_one_of_those_that_do_not_join_does(
    tmp_path: Path,
) -> None:
    path = script(
        tmp_path,
        """
        import os, stat, sys
        print(os.environ["HOLDFAST_JOB"], os.environ["HOLDFAST_BACKEND"], os.environ["HOLDFAST_SIZE"], sys.argv[1:])
        assert os.environ["HOLDFAST_REGISTER"].startswith("sqlite:///")
        assert stat.S_IMODE(os.stat(os.environ["HOLDFAST_KEY_FILE"]).st_mode) == 0o600
        assert os.path.isdir(os.environ["HOLDFAST_LOG_DIR"])
        print("no newline at the end", end="", file=sys.stderr)
        sys.stderr.flush()
        sys.exit(3 if os.environ.get("RANK") == "1" else 0)
        """,
    )
    options = ("-n", "2", "--spares", "1", "--backend", "gloo", "--job", "mine")
    done = holdfast("run", *options, path, "--lr", "0.1", "-n", "7")
    assert done.returncode == 1
    for n in range(3):
        assert f"[{n}] mine gloo 2 ['--lr', '0.1', '-n', '7']" in done.stdout
        assert f"[{n}] no newline at the end" in done.stdout
        assert (f"[{n}] exited with status 3" in done.stdout) == (n == 1)
    assert "no process joined the job" in done.stdout and "exit statuses [0, 3, 0]" in done.stdout


# -- run: jobs


EXAMPLE = ROOT / "examples" / "train.py"


def last_losses(output: str) -> list[str]:
    """The loss that each rank printed for the last step."""
    return [line.split("loss ")[1].split()[0] for line in output.splitlines() if "step 99:" in line]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The example as a job in which nothing fails, and the folder of its event logs."""
    logs = tmp_path_factory.mktemp("run") / "events"
    return holdfast("run", "-n", "2", "--logs", logs, EXAMPLE, "--steps", "100"), logs


def test_run_runs_a_job(undisturbed: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, logs = undisturbed
    assert done.returncode == 0, done.stdout
    first, second = last_losses(done.stdout)
    assert first == second
    assert len(list(logs.glob("*.jsonl"))) == 2


@pytest.mark.parametrize("backend", [pytest.param("ucx", marks=pytest.mark.thorough), "mpi"])
def test_one_flag_changes_the_transport(
    backend: str, undisturbed: tuple[subprocess.CompletedProcess[str], Path]
) -> None:
    """The same script, with the same losses; over mpi the processes take the places of those that mpirun starts."""
    done = holdfast("run", "-n", "2", "--backend", backend, EXAMPLE, "--steps", "100")
    assert done.returncode == 0, done.stdout
    assert last_losses(done.stdout) == last_losses(undisturbed[0].stdout)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_all_processes_end_with_the_launcher(tmp_path: Path, number: int) -> None:
    """One that is killed: tests/ft/operations/test_launch.py."""
    path = script(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    launcher = subprocess.Popen([HOLDFAST, "run", "-n", "2", path], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pids = [int(next_line(launcher.stdout).split()[1]) for _ in range(2)]
    launcher.send_signal(number)
    assert launcher.wait(PROGRAM_SECONDS) == 128 + number
    launcher.stdout.close()
    assert becomes_true(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids)), f"of {pids} some run"


# -- run: after the last step


STEPS = """
from holdfast import ft
with ft.Session() as session:
    for attempt in session.steps(2):
        with attempt:
            pass
"""


def launched(tmp_path: Path, after_the_steps: str, **plan: Any) -> int:
    """The exit status of a job of one rank that goes on after its steps."""
    path = script(tmp_path, STEPS + textwrap.dedent(after_the_steps))
    return launch(LaunchPlan(python_command(path, [str(tmp_path)]), 1, **plan))


def test_run_lets_a_rank_end_its_work_after_the_last_step_and_fails_if_it_fails_then_and_shows_no_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Progress bars come out as lines."""
    after_the_steps = r"""
        import pathlib, sys, time
        print("10%\r20%\r30%\n\x1b[2J\x1b[31mred\x1b[0m [/dev/shm]", flush=True)
        time.sleep(1.0)
        pathlib.Path(sys.argv[1], "model").touch()
        sys.exit(3)
    """
    assert launched(tmp_path, after_the_steps, grace=Grace(at_end=0.2)) == 1
    assert (tmp_path / "model").exists()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "0%" in line] == ["[0] 10%", "[0] 20%", "[0] 30%"]
    assert "[0] \\x1b[2Jred [/dev/shm]" in lines
    assert any("rank 0 exited with status 3" in line for line in lines)


@pytest.mark.parametrize(
    ("lingering", "grace"),
    [
        ("import time; time.sleep(600)", Grace(1.0, at_end=0.2)),
        ("import os; os.kill(os.getpid(), 19)", Grace(at_end=0.2)),
    ],
    ids=["sleeps past its grace", "is stopped"],
)
def test_run_names_the_ranks_that_it_ended_after_the_last_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lingering: str, grace: Grace
) -> None:
    assert launched(tmp_path, lingering, grace=grace) == 1
    assert "[0] still ran" in (output := capsys.readouterr().out)
    assert "rank 0 was ended by SIGTERM" in output


# -- holdfast rl


run_rl = partial(run_holdfast, "rl", timeout=240.0)
ARITHMETIC = ROOT / "examples" / "rl" / "arithmetic.toml"


def test_a_dry_run_prints_the_whole_configuration_and_starts_nothing(tmp_path: Path) -> None:
    done = said("rl", "train", ARITHMETIC, "-d", tmp_path / "run", "--dry-run", "--set", "trainer.replicas=3")
    assert done.exit_code == 0, done.stderr
    assert "replicas = 3" in done.stdout and "weight_decay" in done.stdout
    assert not (tmp_path / "run").exists()


def test_all_that_is_wrong_with_a_configuration_is_said_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text("steps = 0\n[sampling]\ngroup = 1\n[trainer]\nreplica = 3\n")
    done = said("rl", "train", file)
    assert done.exit_code == 2 and not done.stdout
    for place in ("bad.toml:1", "bad.toml:3", "bad.toml:5", "did you mean 'replicas'?"):
        assert place in done.stderr, done.stderr


def test_an_environment_is_served_until_the_command_is_ended() -> None:
    pytest.importorskip("websockets", reason="pip install 'holdfast[rl]'")
    from holdfast.rl.environments.client import EnvironmentClient

    async def first_words(url: str) -> str:
        async with EnvironmentClient(url) as client:
            return (await client.reset(3)).text

    command: list[str | Path] = [HOLDFAST, "rl", "environment", "serve", "guess?high=7"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        found = re.search(r"guess\?high=7: (ws://127\.0\.0\.1:\d+), 64 sessions", next_line(serving.stdout))
        try:
            assert found and asyncio.run(first_words(found[1])) == "guess a number from 1 to 7"
        finally:
            serving.send_signal(signal.SIGINT)
        assert serving.wait(PROGRAM_SECONDS) == 0


@pytest.mark.thorough
def test_a_run_is_trained_and_gone_on_with_and_its_pages_are_written(tmp_path: Path) -> None:
    """The second command trains the steps that the first was not asked for."""
    run = tmp_path / "run"
    few = ("--set", "checkpoint.every=2", "--set", "evaluation.every=2", "--set", "telemetry.tensorboard=true")
    first = run_rl("train", ARITHMETIC, "-d", run, "--set", "steps=4", "--set", "model.warmup_steps=2", *few, "--json")
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["steps"] == 4 and len(json.loads(first.stdout)["digest"]) == 32
    assert list((run / "tensorboard").iterdir())
    second = run_rl("resume", run, "--set", "steps=6", "--json")
    assert second.returncode == 0, second.stderr
    assert json.loads(second.stdout)["steps"] == 6
    pages = run_rl("report", run, "--output", tmp_path / "pages")
    assert pages.returncode == 0, pages.stderr
    report, episodes = ((tmp_path / "pages" / name).read_text() for name in ("report.html", "episodes.html"))
    assert "6 steps were committed" in report and "trainer-0" in report and "generator-0" in report
    assert "reference" in episodes


SMALL = ("model.warmup_steps=0", "evaluation.every=0", "trainer.spares=0", "trainer.replicas=1", "engine.kind=local")


def test_ctrl_c_while_the_loop_is_made_leaves_no_half_of_it_and_no_coroutine_that_was_never_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None: ...

    made = list[asyncio.AbstractEventLoop]()

    def interrupted() -> asyncio.AbstractEventLoop:
        signal.raise_signal(signal.SIGINT)  # it reaches the main thread
        made.append(asyncio.SelectorEventLoop())
        return made[0]

    monkeypatch.setattr(asyncio, "new_event_loop", interrupted)
    coroutine = work()
    with pytest.raises(KeyboardInterrupt):
        run_until_signalled(coroutine)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED
    assert made[0].is_closed(), "the loop was made whole, though the interruption came first"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("number", "after", "status"), [(signal.SIGINT, "starting 1 trainer", 130), (signal.SIGTERM, "step ", 143)]
)
def test_a_signal_ends_a_run_and_all_its_processes(
    tmp_path: Path, number: signal.Signals, after: str, status: int
) -> None:
    sets = [argument for each in SMALL for argument in ("--set", each)]
    command: list[str | Path] = [HOLDFAST, "rl", "train", ARITHMETIC, "-d", tmp_path / "run", *sets]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as training:
        assert training.stdout is not None and training.stderr is not None
        seen = ""
        while after not in seen:
            line = next_line(training.stdout)
            assert line, training.stderr.read()
            seen += line
        training.send_signal(number)
        rest, errors = training.communicate(timeout=PROGRAM_SECONDS)
    assert training.returncode == status, errors
    assert not errors.replace("Aborted!", "").replace("Aborted.", "").strip(), errors
    assert "lost" not in rest, rest
    assert ("holdfast rl resume" in rest) == (after == "step ")
    started = [each.pid for each in RunDirectory(tmp_path / "run").events() if isinstance(each, ProcessStarted)]
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]


# -- without extras: every command works, or says what to install


WITHOUT_EXTRAS = {
    "backends": 0,
    "bench all_reduce --backends inproc -n 2 --sizes 8 --json": 0,
    "bench copy --report figures": command_line.CANNOT_BEGIN,
    "bench store --workloads model --size 1M --starts 1 --rounds 1": command_line.CANNOT_BEGIN,
    "blame nowhere": 1,
    "chaos list": 0,
    "chaos run kill-rank --report here": command_line.CANNOT_BEGIN,
    "conformance --backend shm": command_line.CANNOT_BEGIN,
    "demo": command_line.CANNOT_BEGIN,
    "gate HEAD~1 HEAD": command_line.CANNOT_BEGIN,
    "new-plugin mine": 0,
    "rl environment": command_line.CANNOT_BEGIN,
    "rl report run": command_line.CANNOT_BEGIN,
    "rl train task.toml": command_line.CANNOT_BEGIN,
    "run -n 1 nowhere.py": command_line.CANNOT_BEGIN,
    "simulate --seeds 2": 0,
    "store ls sqlite:///nowhere/job.sqlite": command_line.CANNOT_BEGIN,
    "top": command_line.CANNOT_BEGIN,
    "tune --help": 0,
}
"""What is started, and its exit status."""

CORE_ONLY = """
import importlib.machinery, importlib.metadata as metadata, io, json, os, re, sys

def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()

wanted, core = ["holdfast"], set()
while wanted:
    if (name := canonical(wanted.pop())) not in core:
        core.add(name)
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        wanted += [re.match(r"[\\w.-]+", line)[0] for line in lines if "extra ==" not in line]
modules = metadata.packages_distributions()
absent = {module for module, names in modules.items() if not core & set(map(canonical, names))}
absent -= {"setuptools", "pip", "_distutils_hack", "pkg_resources"}

class CoreOnly(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in absent else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = CoreOnly

import torch  # here, once for all forks

from holdfast.harness.cli.app import main

pids = []
for number, command in enumerate(json.loads(sys.argv[1])):
    pids.append(os.fork())
    if not pids[-1]:
        out = os.open(f"{number}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1), os.dup2(out, 2)
        sys.argv = ["holdfast", *command.split()]
        status = 0
        try:
            main()
        except SystemExit as exit:
            status = exit.code or 0
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
for pid in pids:
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_without_extras_a_command_runs_or_says_what_to_install(tmp_path: Path) -> None:
    """Each is started in a fork of one process that finds core dependencies only."""
    (tmp_path / "task.toml").write_text("")
    program = ("-c", CORE_ONLY, json.dumps(list(WITHOUT_EXTRAS)))
    statuses = run_python(*program, cwd=tmp_path, environ=os.environ | {"COLUMNS": "200"}).split()
    for number, (command, status) in enumerate(zip(WITHOUT_EXTRAS, statuses, strict=True)):
        output = (tmp_path / f"{number}.txt").read_text()
        assert int(status) == WITHOUT_EXTRAS[command], f"{command}: {output}"
        assert "Traceback" not in output, f"{command}: {output}"
        assert "not installed" not in output or "pip install 'holdfast[" in output, f"{command}: {output}"
    assert not (tmp_path / "figures").exists(), "it is said before anything is measured or written"
    assert COMMANDS.commands.keys() == {command.split()[0] for command in WITHOUT_EXTRAS}
