"""Programs that no package holds: the studies of docs/experiments, and the examples of other systems, run."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

from holdfast.harness.testbed import netns
from holdfast.store.catalog.fan_out import AT_ONCE
from support.programs.forked_programs import run_forked, run_program, run_python
from support.source_tree import ROOT
from support.waiting import PROGRAM_SECONDS

# -- studies: each is listed, and runs, for a moment here

FOLDER = ROOT / "docs" / "experiments"
PROGRAMS = sorted(FOLDER.glob("*.py"))


def run(name: str, *arguments: str, timeout: float = PROGRAM_SECONDS) -> str:
    """What a study prints; it must end with status 0."""
    program = FOLDER / f"{name}.py"
    done = run_forked(program.read_text(), [str(program), *arguments], timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_each_study_is_listed_with_the_command_that_it_names(program: Path) -> None:
    command = f"python docs/experiments/{program.name}"
    assert command in (FOLDER / "README.md").read_text()
    assert command in run(program.stem, "--help")


def test_slow_ranks_on_too_few_cores_are_not_evicted() -> None:
    found = json.loads(run("evictions", "--seconds", "4", "--ranks", "4", "--suspect", "0.3", "--json"))
    assert (found["evictions"], found["epochs"]) == ([], 1)
    assert found["rounds"] > 0 and sum(found["hogs"].values()) > 0


def test_a_version_reaches_a_thousand_readers_while_a_replica_sends_few_copies() -> None:
    found = json.loads(run("fan_out", "--readers", "1000"))
    assert found["publisher_copies"] <= 1
    assert found["reader_copies"] <= 4 and found["at_once"] <= 2 * AT_ONCE
    assert found["seconds"] < 6 * found["alone"] < found["direct"] / 10
    assert found["group_bytes"] < 100_000


def test_the_messages_of_an_exchange_grow_slower_than_the_job(tmp_path: Path) -> None:
    """Eight times the members: no member handles twice the messages."""
    run("growth", str(tmp_path), "--sizes", "256", "2048")
    found = json.loads((tmp_path / "simulate.json").read_text())
    small, large = found["exchanges"]
    assert large["messages_max"] < 2 * small["messages_max"] and large["messages_mean"] < 2 * small["messages_mean"]
    assert large["depth"] <= small["depth"] + 2
    assert len(list(tmp_path.glob("*.svg"))) == 4


@pytest.mark.parametrize(
    "arguments",
    [
        "--hours 20000 --bursts 0.05",
        pytest.param("--hours 10 --bursts 0.2 --shared 0.5", marks=pytest.mark.thorough),
    ],
)
def test_a_node_is_evicted_only_if_no_other_hears_it(arguments: str, tmp_path: Path) -> None:
    """Bursts of loss on single paths lead to suspicions alone; on all paths of a node, to evictions."""
    run("false_evictions", str(tmp_path), *arguments.split(), "--seed", "1")
    (found,) = json.loads((tmp_path / "false-evictions.json").read_text())
    assert (found["false_evictions"] > 0) == (found["shared"] > 0)
    assert found["windows"] > 0 and found["suspicions"] > 0
    assert (tmp_path / "simulate-false-evictions.svg").exists()


@pytest.mark.parametrize(
    ("backend", "kills"),
    [
        ("shm", 6),
        pytest.param("shm", 60, marks=pytest.mark.thorough),
        pytest.param("gloo", 4, marks=pytest.mark.thorough),
        pytest.param("ucx", 4, marks=pytest.mark.thorough),
        pytest.param("mpi", 4, marks=pytest.mark.thorough),
    ],
)
def test_ranks_of_an_exchange_for_experts_are_killed_at_random(backend: str, kills: int) -> None:
    """Amid steps, and anywhere: those that live have the same, right results, or the study fails."""
    asked = f"--contestants --kills {kills} --kill-backend {backend} --seed {kills} --json"
    assert json.loads(run("experts", *asked.split()))["kills"]["kills"] == kills


def test_an_exchange_for_experts_is_measured_beside_a_collective() -> None:
    names = ["switch:inproc", "all_to_all:inproc"]
    small = "--ranks 2 --tokens 8 --hidden 4 --rounds 1 --steps 2 --kills 0 --json"
    exchanges = json.loads(run("experts", "--contestants", *names, *small.split()))["exchanges"]
    assert [each["contestant"] for each in exchanges] == names
    assert all(each["ms"] > 0 for each in exchanges)


@pytest.mark.parametrize(
    ("arguments", "ways"),
    [
        ("nccl --stand-in", 2),
        pytest.param("gloo", 3, marks=pytest.mark.thorough),
        pytest.param("mpi", 2, marks=pytest.mark.thorough),
    ],
)
def test_each_way_to_call_a_library_is_measured_at_each_size(arguments: str, ways: int) -> None:
    calls = json.loads(run("layers", *arguments.split(), "--sizes", "8,64K", "--rounds", "6", "--json"))["calls"]
    assert [call["nbytes"] for call in calls] == [8] * ways + [65_536] * ways
    assert all(0 < call["least_us"] <= call["us"] for call in calls)
    assert [(call["extra_us"], call["speed"]) for call in calls[::ways]] == [(0, 1)] * 2
    assert calls[-1]["way"] == "holdfast"


@pytest.mark.thorough
def test_a_trial_of_the_gate_itself_is_a_run_of_it() -> None:
    """A head that does half as much again is found, and called so much slower."""
    asked = f"{ROOT} --trials 1 --only membership --effect 0.5 --most 3"
    printed = run("gate_calibration", *asked.split(), timeout=280.0)
    (slowed,) = re.findall(r"\| membership \| 50% \| 1 \| 0 \| 0 \| 0 \| (\S+)% ", printed)
    assert float(slowed) == pytest.approx(50, abs=15)


@pytest.mark.thorough
def test_observers_and_sessions_are_measured_beside_bare_communicators() -> None:
    cost = json.loads(run("overhead", "--rounds", "8", "--work", "1", "--json"))
    assert [op["variant"] for op in cost["ops"]] == ["bare", "recorder", "recorder and metrics"]
    assert cost["ops"][0]["ratio"] == 1
    assert all(op["us"] > 0 and op["alone_us"] > 0 for op in cost["ops"])
    assert cost["step"]["bare_ms"] >= 0.1 and 0 < cost["step"]["background"] < 1


@pytest.mark.thorough
@pytest.mark.skipif(netns.missing() is not None, reason=f"network namespaces: {netns.missing()}")
def test_hierarchical_collectives_are_measured_beside_flat_ones() -> None:
    bench = json.loads(run("hosts", *["--hosts", "2", "--sizes", "4K", "--rounds", "1", "--json"]))
    assert (bench["flat"], bench["layered"]) == ("gloo", "hier-gloo")
    assert {cost["op"] for cost in bench["costs"]} == {"all_reduce", "all_gather", "reduce_scatter", "broadcast"}
    assert all(cost["speed"] > 0 for cost in bench["costs"])


@pytest.mark.parametrize("ranks", [4, 5])
def test_traffic_is_that_of_the_algorithms(ranks: int) -> None:
    asked = f"--ranks {ranks} --sizes {4096 * ranks} --traffic all_to_all all_gather broadcast"
    sent = {op: sizes[str(4096 * ranks)] for op, sizes in json.loads(run("quantised", *asked.split())).items()}
    assert all(each == {"messages": ranks - 1, "nbytes": 4096 * (ranks - 1)} for each in sent["all_to_all"])
    assert {each["nbytes"] for each in sent["all_gather"]} == {4096 * (ranks - 1)}
    assert sum(each["messages"] for each in sent["broadcast"]) == ranks - 1


@pytest.mark.thorough
def test_a_quantised_all_reduce_moves_a_quarter_of_the_bytes_within_its_bound() -> None:
    (cost,) = json.loads(
        run("quantised", "--backends", "inproc", "--sizes", str(1 << 20), "--ranks", "3", "--rounds", "1")
    )["costs"]
    assert 0.25 < cost["quantised_bytes"] / cost["plain_bytes"] < 0.27
    assert 0.0 < cost["error"] < 1.0


def test_calls_of_torchstores_interface_are_timed() -> None:
    printed = run("torchstore_calls", "--rounds", "3", "--most", "5000", "--new-keys", "3")
    assert re.findall(r"^holdfast +(\S+)", printed, re.M) == ["3-numbers", "4KiB", "3"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ("recovery_bound --ranks 2 --kills 1", r"holdfast [\d.]+ ms, the least [\d.]+ ms: .*medians of 1"),
        ("service_kills --engines local --kills 3", "local: 3 kills under 6 clients, .*none lost"),
        ("recovery_ulfm --ranks 3 --kills 1", r"ULFM, 3 ranks, 1 kill: median [1-9][\d.]* ms"),
        ("ucx_perftest get ping_pong --sizes 8 --rounds 1 --seconds 0.1", "get .*8 B"),
        ("rl_modes --steps 4 --seeds 1", r"asynchronous over synchronous: [\d.]+"),
        ("rl_updates --steps 6 --hidden-size 32", r"median [\d.]+ ms, .*, of 2"),
        ("weight_pauses_gpu --device cpu --size 1M --versions 3 --ways host follow", r"host .*pause.*\nfollow .*pause"),
        (
            "weight_pauses --size 8388608 --versions 4",
            r"holdfast .* pause +[\d.]+ ms.*\nholdfast-mapped .* pause .*\nsafetensors .* pause",
        ),
    ],
    ids=lambda text: text.split()[0],
)
def test_a_study_prints_its_figure(arguments: str, result: str) -> None:
    assert re.search(result, run(*arguments.split()))


# -- examples of systems with an environment of their own: what they are pinned to, and that they run

STACK = ROOT / "examples" / "stack"
REQUIREMENTS = sorted(STACK.glob("*/requirements.txt"))


def pins(path: Path) -> dict[str, str]:
    """The versions in a file of requirements, by name."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert not [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.+-]+", line)], "every version is pinned"
    return {canonicalize_name(name): version for name, _, version in (each.partition("==") for each in lines)}


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.parent.name)
def test_every_version_is_pinned_and_torch_is_ours(path: Path) -> None:
    assert pins(path)["torch"] == pins(ROOT / "constraints.txt")["torch"]


@pytest.mark.parametrize("path", sorted(STACK.rglob("*.py")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 150


def run_in(extra: str, *command: str | Path) -> str:
    """The output of a program in a system's own environment."""
    python = ROOT / ".venv" / "extras" / extra / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{extra} is not installed: make {'vllm-newest' if extra == 'vllm-0.33' else f'extra-{extra}'}")
    return run_program(python, *command, timeout=590.0)


JOBS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import restarted_job as jobs
jobs.STEPS = 6
print(json.dumps([jobs.job(*sys.argv[2:], "gloo"), jobs.job(*sys.argv[2:], "holdfast", 5)]))
"""


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("system", "example"), [("trl", "grpo"), ("lightning", "lightning")])
def test_a_trainer_over_holdfast_is_equal_to_gloo_though_a_rank_is_killed(system: str, example: str) -> None:
    gloo, killed = json.loads(run_in(system, "-c", JOBS, STACK, system, example))
    assert killed["backend"].startswith("holdfast.") and not gloo["backend"].startswith("holdfast.")
    assert len({*killed["weights"], *gloo["weights"]}) == 1
    assert (killed["restarts"], gloo["restarts"]) == (1, 0) and len(gloo["losses"]) == 6
    if system == "trl":
        assert killed["losses"] == gloo["losses"]
    else:
        assert 0 < len(killed["losses"]) < 6, "it went on from a checkpoint"
        assert killed["losses"] == gloo["losses"][-len(killed["losses"]) :]


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("system", "command"),
    [
        *((system, "show.py") for system in ("openenv", "ray", "torchft", "verl")),
        ("vllm", "in_one_process.py"),
        ("vllm-0.33", "in_one_process.py"),
        ("torchft", "own_tests.py process_group_test"),
    ],
)
def test_the_example_of_a_system_finds_what_the_table_says(system: str, command: str) -> None:
    program, *arguments = command.split()
    run_in(system, STACK / system.partition("-")[0] / program, *arguments)


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_torchtitan_with_torchft_goes_on_when_a_group_is_killed_and_comes_back() -> None:
    if not list((ROOT / ".venv" / "extras" / "titan").glob("lib/*/site-packages/torchft")):
        pytest.skip("torchft is not installed beside torchtitan: make extra-titan")
    assert "equal: True" in run_in("titan", STACK / "titan" / "two_groups.py", "each step, 2 ranks")


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("monarch") is None, reason="needs Monarch: pip install 'holdfast[rl]'")
def test_memory_between_actors_of_monarch_is_faster_than_monarchs_over_tcp() -> None:
    run_python(STACK / "monarch" / "rdma.py", "16", "15")  # medians: three rounds were too few beside other tests


# -- the newest torch that is claimed, in an environment of its own


@pytest.mark.thorough
@pytest.mark.timeout(1200)  # it takes several times as long beside others as alone
def test_each_call_of_the_adapter_works_on_the_newest_torch() -> None:
    versions = re.findall(r"^TORCH_VERSIONS \?=(.*)", (ROOT / "Makefile").read_text(), re.M)[0].split()
    assert versions == sorted(versions, key=Version), "make torch-env-newest takes the last one"
    python = ROOT / ".venv" / "torch" / versions[-1] / "bin" / "python"
    if not python.exists():
        pytest.skip(f"torch {versions[-1]} is not installed: make torch-env-newest")
    chosen = "surface or calls or point_to_point or versions or windows or transport or shrink or as_large"
    tests = ["-m", "not thorough", "-k", chosen, ROOT / "tests" / "comms" / "torchdist"]
    assert " passed" in run_program(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, timeout=1190.0)
