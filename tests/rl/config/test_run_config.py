"""A configuration is read from TOML with overrides. All that is wrong with it is said at once, with its line."""

from __future__ import annotations

import ast
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.plugins.registry import registry
from holdfast.rl.config.contradictions import check_plugins_run_here
from holdfast.rl.config.named_code import extra_python
from holdfast.rl.config.run_config import PRESETS, CriterionConfig, Objective, RunConfig, Sampling, TrainerConfig
from holdfast.rl.config.toml import check_unchanged, config_of, load_config, parse_config, placed, resolved
from holdfast.rl.errors import BadConfig, ConfigChanged
from support.rl.small_batches import objective
from support.source_tree import ROOT, modules, parsed

EXAMPLE = ROOT / "examples" / "rl" / "arithmetic.toml"
PYTHON = '[[reward]]\nkind = "python"\nfunction = '
GUESS = '[evaluation]\nprompts = 8\n[environment]\nname = "guess"\n'
VLLM = '[generator]\nkind = "vllm"\n'
TITAN = '[trainer]\nkind = "titan"\n'
HOSTS = '[engine]\nhosts = ["tcp://a:1"]\n'


def refused(text: str, *overrides: str, folder: Path = Path()) -> list[str]:
    """The problems of a document, as they are printed."""
    with pytest.raises(BadConfig) as caught:
        parse_config(text, "run.toml", overrides, folder)
    return str(caught.value).splitlines()


def fields_of(section: str) -> tuple[str, ...]:
    """The fields of a section; none of what is no section."""
    return getattr(getattr(RunConfig(), section), "__struct_fields__", ())


@pytest.mark.parametrize("path", sorted(EXAMPLE.parent.glob("*.toml")), ids=lambda path: path.stem)
def test_each_example_is_read_and_reads_back_as_itself(path: Path) -> None:
    config = load_config(path)
    assert parse_config(resolved(config), "again.toml", folder=path.parent) == config
    if path == EXAMPLE:
        assert (config.algorithm.groups, config.sampling.group, config.objective.entropy) == (32, 8, 0.02)
        assert config.reward == (CriterionConfig(kind="exact"),)


def test_overrides_are_toml_or_plain_words() -> None:
    overrides = ("trainer.rate=1e-4", "algorithm.mode=synchronous", "algorithm.staleness = 0", "sampling.stop=[3, 4]")
    config = load_config(EXAMPLE, overrides)
    assert config.trainer.rate == 1e-4
    assert (config.algorithm.mode, config.algorithm.staleness, config.sampling.stop) == ("synchronous", 0, (3, 4))


@pytest.mark.parametrize("algorithm", PRESETS)
def test_an_algorithm_sets_the_defaults_of_the_objective(algorithm: Any) -> None:
    config = parse_config(f'[objective]\nalgorithm = "{algorithm}"\nkl = 0.1\n[sampling]\nstop = [1]', "run.toml")
    assert config.objective == objective(algorithm, kl=0.1)
    assert parse_config(resolved(config), "again.toml") == config


def test_everything_that_is_wrong_is_said_at_once_and_in_order() -> None:
    text = """steps = "many"
sed = 3

[algorithm]
groups = 0
staleness = 1.5

[sampling]
group = 1
[trainer]
rat = 0.1
rate = inf
[[reward]]
kind = "exact"
[[reward]]
kind = "fancy"
"""
    assert refused(text, "engine.kind=ray", "nothing") == [
        "--set nothing: write it as section.field=value",
        "--set engine.kind=ray: engine.kind: 'ray' is not allowed: expected 'local', 'monarch'",
        "run.toml:1: steps: 'many' is not allowed: expected `int`, got `str`",
        "run.toml:2: sed: no such field; did you mean 'seed'?",
        "run.toml:5: algorithm.groups: 0 is not allowed: expected `int` >= 1",
        "run.toml:6: algorithm.staleness: 1.5 is not allowed: expected `int`, got `float`",
        "run.toml:9: sampling.group: 1 is not allowed: expected `int` >= 2",
        "run.toml:11: trainer.rat: no such field; did you mean 'rate'?",
        "run.toml:12: trainer.rate: inf is not allowed: expected a finite number",
        "run.toml:16: reward[1].kind: 'fancy' is not allowed: expected 'exact', 'format', 'length', 'python'",
    ]


@pytest.mark.parametrize(
    "text, words",
    [
        ("[algorithm]\nupdates = 4\nstaleness = 2", "3: algorithm.staleness: a batch can never fill"),
        ('[algorithm]\nmode = "synchronous"', "2: algorithm.staleness: the synchronous loop"),
        ("steps = 9\n[algorithm]\nupdates = 2", "1: steps: must be a multiple of algorithm.updates = 2"),
        ('[objective]\nalgorithm = "dapo"', " sampling.stop: without a stop token"),
        ('[data]\ntrain = "x.jsonl"', "2: data.train: the arithmetic task"),
        ('[data]\ntask = "jsonl"', '2: data.train: task = "jsonl" needs a file'),
        ('[model]\npath = "absent"', "2: model.path: there is no folder"),
        ("reward = []", "1: reward: an episode needs a reward or an environment"),
        ('[[reward]]\nkind = "format"', "2: reward[0].pattern: a criterion of kind 'format' needs one"),
        ('[[reward]]\nkind = "format"\npattern = "("', "3: reward[0].pattern: not a regular expression"),
        ('[[reward]]\npattern = "x"', "2: reward[0].pattern: it has 0 groups"),
        ('[[reward]]\nkind = "length"', "2: reward[0].margin: must be from 1"),
        ("[algorithm]\nupdates = 40\nstaleness = 40", "2: algorithm.updates: a batch of algorithm.groups = 32"),
        ("[trainer]\nreplicas = 9", "2: trainer.replicas: more trainers than trainer.units = 4"),
        ("[trainer]\nunits = 99", "2: trainer.units: a batch of algorithm.groups = 32"),
        ('[trainer]\nstrategy = "ddp"\ncopies = 2', "3: trainer.copies: each trainer has the whole policy"),
        ("[store]\ncopies = 3", "2: store.copies: more copies than store.holders = 2"),
        ('[generator]\npython = "/x"', "2: generator.python: only vllm"),
        ('[generator]\non_update = "wait"', "2: generator.on_update: only vllm pauses so"),
        ("[generator]\ntensor_parallel = 2", "2: generator.tensor_parallel: only vllm"),
        (VLLM + 'python = "absent"', "2: generator.kind: vllm is not installed: there is no"),
        (VLLM + 'python = "~nobody-of-this-name/python"', "2: generator.kind: vllm is not installed: there is no int"),
        (VLLM + '[store]\ncast = "bf16"', "4: store.cast: vllm's workers read every bit"),
        (VLLM + 'update = "drain"', "3: generator.update: vllm pauses as"),
        (VLLM + "[sampling]\ntop_p = 0.5", "4: sampling.top_p: vllm has no log-probs"),
        ('[trainer]\npython = "/x"', "2: trainer.python: only titan"),
        (TITAN + 'python = "absent"', "2: trainer.kind: titan is not installed: there is no"),
        (TITAN + 'strategy = "ddp"', "3: trainer.strategy: TorchTitan shares"),
        (TITAN + "[model]\nlora_rank = 2", "4: model.lora_rank: TorchTitan's models"),
        (TITAN + "replicas = 3\n[titan]\ntensor_parallel_degree = 2", "3: trainer.replicas: must be a multiple of 2"),
        ("[titan]\ntensor_parallel_degree = 2", "2: titan.tensor_parallel_degree: it is for trainers"),
        ("[titan]\ntensor_parallel = 2", "2: titan.tensor_parallel: no such field; did you mean"),
        (
            TITAN + '[titan]\nconfig = "a:b"\ntensor_parallel_degree = 2',
            "5: titan.tensor_parallel_degree: titan.config says it already",
        ),
        (TITAN + '[titan]\nconfig = "llama3_8b"', "4: titan.config: write it as torchtitan.models."),
        ('[engine]\nkind = "local"\nhosts = ["a"]', "3: engine.hosts: the local engine"),
        (HOSTS.replace("tcp:", "udp:"), "2: engine.hosts: 'udp://a:1' is no address of a host"),
        (HOSTS.replace('["', '["slurm", "'), "2: engine.hosts: 'slurm' is no address of a host"),
        (HOSTS, "2: engine.register: a file is on one host"),
        (HOSTS + 'register = "sqlite:///a"', "3: engine.register: a file is on one host"),
        (HOSTS, "2: trainer.backend: shm is memory of one host"),
        (HOSTS, "2: store.plane: the plane of one host reads no other host's memory"),
        (HOSTS + "silence = 0", "3: engine.silence: 0 is not allowed"),
        ('[[reward]]\nkind = "python"', "2: reward[0].function: a criterion of kind 'python' needs one"),
        ('[[reward]]\nfunction = "a.py:b"', "2: reward[0].function: a criterion of kind 'exact' has none"),
        (PYTHON + '"absent.py:brief"', "3: reward[0].function: there is no file"),
        (PYTHON + '"brief"', "3: reward[0].function: 'brief' is not FILE.py:NAME"),
        ("[model]\nlora_alpha = 8.0", "2: model.lora_alpha: there are no adapters"),
        ("[trainer]\nmicro_batch = -1", "2: trainer.micro_batch: -1 is not allowed: expected `int` >= 0"),
        (GUESS.replace("guess", "python:absent.py:A"), "4: environment.name: there is no file"),
        (GUESS + 'addresses = ["a:1"]', "5: environment.addresses: 'a:1' is no address of a server"),
        (GUESS + 'addresses = ["ws://a:1"]\nservers = 2', "6: environment.servers: 0, where servers run"),
        (GUESS + "servers = 0", "5: environment.servers: 1 or more, unless servers run already"),
        (GUESS + "share = 0", "5: environment.share: 0 is not allowed"),
        (GUESS + 'share = 0.5\n[data]\ntask = "jsonl"', '7: data.train: task = "jsonl" needs a file'),
        ("reward = []\n" + GUESS + "share = 0.5", "1: reward: an episode needs a reward or an environment"),
        (GUESS + "sessions = 4", "5: environment.sessions: 4 episodes can be played at the same time"),
        (GUESS + "max_tokens = 100", "5: environment.max_tokens: no room for a turn"),
        (GUESS + "arguments = 3", "5: environment.arguments: 3 is not allowed: expected `object`"),
        (GUESS + "[environment.arguments]\nhigh = [1]", "5: environment.arguments: "),
        (GUESS + '[data]\ntask = "jsonl"', "4: environment.name: the environment makes the prompts"),
        (GUESS + '[[reward]]\nkind = "length"\nmargin = 1', "5: reward[0]: the environment gives the reward"),
        (GUESS + "[model]\nwarmup_steps = 1", "6: model.warmup_steps: an environment has no answers"),
        ('[environment]\nname = "guess"', "2: evaluation.prompts: say how many held-out episodes"),
        ('[environment]\nname = "guess?high=9"', "2: environment.name: options are a table of their own"),
        ("[environment]\nservers = 2", "2: environment.servers: there is no environment"),
        ("[model]\nwarmup_batch = 8", "2: model.warmup_batch: there are no supervised steps"),
        ('[trainer]\nbackend = "ib"', "2: trainer.backend: there is no 'ib'; there are auto, gloo, "),
        ('[trainer]\nbackend = ""', "2: trainer.backend: there is no ''; there are auto, "),
        ('[trainer]\nbackend = "shm,ib"', "2: trainer.backend: there is no 'ib'"),
        ('[trainer]\nbackend = "nixl"', "2: trainer.backend: 'nixl' has only a memory plane"),
        ('[trainer]\nbackend = "mpi"', "2: trainer.backend: 'mpi' works in processes that mpirun starts"),
        ('[trainer]\nbackend = "fake"', "2: trainer.backend: 'fake' connects no other ranks"),
        ('[trainer]\nbackend = "inproc"', "2: trainer.backend: 'inproc' works within one process only"),
        ('[store]\nplane = "gloo"', "2: store.plane: 'gloo' has none; there are auto, nixl, "),
        ('[store]\nplane = "rdma"', "2: store.plane: there is no 'rdma'"),
        ('[engine]\nregister = "etcd"', "2: engine.register: 'etcd' is not a register's URL; known are etcd://"),
        ("[generator]\nreplicas = 5000", "2: generator.replicas: 5000 is not allowed: expected `int` <= 4096"),
        ("[engine]\nsilence = 1e9", "2: engine.silence: 1000000000.0 is not allowed"),
        ("seed = 9223372036854775808", "1: seed: 9223372036854775808 is not allowed: expected a number of 64"),
        ('[model]\ndevice = "cuda"', "2: trainer.strategy: shards are reduced in memory of the host"),
        (
            '[model]\ndevice = "cuda:1"\n[trainer]\nstrategy = "ddp"\nbackend = "nccl"',
            "5: trainer.backend: it needs a GPU for each trainer",
        ),
        ('[model]\ndevice = "tpu"', "2: model.device: 'tpu' is not allowed"),
        ("trainer = 3", "1: trainer: must be a table, not 3"),
        ("reward = 3", "1: reward: must be tables: write [[reward]]"),
        ("a = [", ""),
    ],
)
def test_what_does_not_work_is_refused_where_it_is_written(text: str, words: str, tmp_path: Path) -> None:
    assert any(line.startswith(f"run.toml:{words}") for line in refused(text, folder=tmp_path))


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ('"a`b" = 1', ['"a`b": no such field']),
        ('"" = 1', ['"": no such field']),
        ('"a\\nb" = 1', ['"a\\nb": no such field']),
        ('[sampling]\n"a.b" = 1', ['sampling."a.b": no such field']),
        ('"a` - at `$.model" = 1', ['"a` - at `$.model": no such field']),
        ('[generator]\nkind = "a` - at `$.b"', ["generator.kind: 'a` - at `$.b' is not allowed"]),
        ("[sampling]\nstop = [[inf]]", ["sampling.stop[0][0]: inf is not allowed"]),
        ("[sampling]\nstop = [inf, [inf]]", ["sampling.stop[0]: inf is not", "sampling.stop[1][0]: inf is not"]),
        (
            "[[reward]]\nweight = [[inf]]\nmargin = -1\n[[reward]]\n'' = 1",
            [
                "reward[0].weight[0][0]: inf is not",
                'reward[1]."": no such field',
                "reward[0].margin: -1 is not allowed",
            ],
        ),
        ("seed = 0x" + "f" * 4000, ["seed: an integer of 16000 bits is not allowed"]),
        ("seed = " + "9" * 5000, ["not TOML: Exceeds the limit"]),
        ("seed = " + "[" * 5000, ["not TOML: maximum recursion"]),
        ('[[reward]]\nkind = "exact"\npattern = "(a{99999999999})"', ["reward[0].pattern: not a regular expression"]),
        (f'[model]\npath = "{"a" * 5000}"', ["model.path: there is no folder"]),
        ("[algorithm]\nupdates = 4\nstaleness = -1", ["staleness: -1 is not allowed: expected `int` >= 0"]),
    ],
)
def test_a_strange_name_or_value_is_a_problem_that_names_it(text: str, problems: list[str]) -> None:
    lines = refused(text)
    assert len(lines) == len(problems), lines
    for words in problems:
        assert any(words in line for line in lines), lines


FIELDS = [*RunConfig.__struct_fields__, *(field for each in RunConfig.__struct_fields__ for field in fields_of(each))]
names = st.sampled_from(FIELDS) | st.text('ab.` []$"\n-\\0', max_size=6) | st.just("x` - at `$.model")
values = st.recursive(
    st.integers() | st.floats() | st.booleans() | st.dates() | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=8,
)


@given(
    st.dictionaries(names, values | st.dictionaries(names, values), max_size=4),
    st.lists(st.builds("{}.{}={}".format, names, names, names), max_size=2),
)
def test_any_document_is_a_configuration_or_is_refused(raw: dict[str, Any], overrides: list[str]) -> None:
    try:
        assert isinstance(config_of(raw, "run.toml", overrides), RunConfig)
    except BadConfig as error:
        assert error.problems


def test_a_backend_that_cannot_run_on_this_host_is_refused_unless_the_run_is_on_others() -> None:
    text = '[trainer]\nbackend = "rccl"\n[store]\nplane = "ucx"\n'
    if registry().backend("rccl").available:
        pytest.skip("this host has an AMD GPU")
    with pytest.raises(BadConfig, match=r"on this host: trainer\.backend: backend 'rccl' is not available"):
        check_plugins_run_here(parse_config(text, "run.toml"))
    for hosts in (HOSTS, HOSTS.replace("tcp://a:1", "slurm:4000")):
        check_plugins_run_here(parse_config(text + hosts + 'register = "etcd://a:1/b"', "run.toml"))
    check_plugins_run_here(parse_config(text, "run.toml", ["trainer.backend=rccl,shm", "store.plane=auto"]))


def test_files_are_found_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "a"}')
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "model"\n[data]\ntask = "jsonl"\ntrain = "train.jsonl"\nheld_out = "test.jsonl"\n')
    assert load_config(path).data.task == "jsonl"
    with pytest.raises(BadConfig, match="cannot be read: No such file"):
        load_config(tmp_path / "absent.toml")


def test_every_field_has_a_description() -> None:
    """A text stands below it."""
    sections = [each for each in parsed(Path("rl/config/run_config.py")).body if isinstance(each, ast.ClassDef)]
    silent = [
        f"{section.name}.{ast.unparse(field.target)}"
        for section in sections
        for field, text in pairwise([*section.body, ast.Pass()])
        if isinstance(field, ast.AnnAssign) and not isinstance(text, ast.Expr)
    ]
    assert {each.partition(".")[0] for each in silent} == {"RunConfig"}, "which has the sections"


literals = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="()[]{}\\*+?|^$."), max_size=8)
exact = st.builds(CriterionConfig, kind=st.just("exact"), pattern=literals.map("({})".format))
configs = st.builds(
    RunConfig,
    seed=st.integers(0, 2**60),
    reward=st.tuples(exact, st.just(CriterionConfig(kind="length", margin=3))),
    sampling=st.builds(Sampling, stop=st.lists(st.integers(0, 9), max_size=3).map(tuple)),
    trainer=st.builds(TrainerConfig, rate=st.floats(1e-12, 1e12)),
    objective=st.builds(Objective, redraws=st.integers(0, 100)),
)


@given(
    configs,
    st.dictionaries(st.sampled_from("abc"), st.integers() | st.booleans() | st.text("xyz?&=") | st.floats(0, 1)),
)
def test_the_resolved_configuration_reads_back_as_itself(config: RunConfig, options: dict[str, Any]) -> None:
    """Also the options of an environment, which are a table."""
    game = parse_config(GUESS, "run.toml")
    game = msgspec.structs.replace(game, environment=msgspec.structs.replace(game.environment, arguments=options))
    for each in (config, game):
        assert parse_config(resolved(each), "resolved.toml") == each


def test_a_resume_may_change_how_many_processes_work_but_not_what_they_compute() -> None:
    begun = load_config(EXAMPLE)
    moved = load_config(EXAMPLE, ["trainer.replicas=4", "engine.kind=local", "steps=900", "telemetry.tensorboard=true"])
    check_unchanged(begun, moved)
    other = load_config(EXAMPLE, ["trainer.rate=1e-3", "seed=1"])
    with pytest.raises(ConfigChanged, match=r": seed was 0 and is 1; trainer\.rate was 0\.0005 and is 0\.001; resume"):
        check_unchanged(begun, other)
    reward = msgspec.structs.replace(begun, reward=(*begun.reward, CriterionConfig(kind="length", margin=1)))
    with pytest.raises(ConfigChanged, match=r"reward\[1\]\.kind was 'absent' and is 'length'"):
        check_unchanged(begun, reward)


@pytest.mark.parametrize("written", ["env/python", "~/env/python"])
@pytest.mark.parametrize(("table", "section"), [(VLLM, "generator"), (TITAN, "trainer")])
def test_an_interpreter_is_found_from_the_document_or_the_home_directory_on_wherever_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, section: str, written: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / ("home" if written.startswith("~") else "elsewhere")
    python = folder / "env" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    config = parse_config(f'{table}python = "{written}"', "run.toml", folder=tmp_path / "elsewhere")
    given = getattr(placed(config, tmp_path / "elsewhere"), section).python
    assert given == str(python)
    assert extra_python("any", given) == python


def test_every_option_is_read_by_the_run() -> None:
    """One that nothing reads would change nothing, whatever a user wrote."""
    product = [path for path in modules() if path.parts[0] in ("rl", "harness")]
    nodes = [node for path in product for node in ast.walk(parsed(path))]
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and id(node) not in called}
    assert {field for each in RunConfig.__struct_fields__ for field in fields_of(each) or (each,)} <= read
