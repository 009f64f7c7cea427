"""Chaos from Python: `fault`, `kill` and `pause` make faults, and `run` injects them into a training function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from holdfast.harness.chaos.fault_type import fault_types
from holdfast.harness.chaos.run.scenario_runner import Result, ScenarioRunner
from holdfast.harness.chaos.scenario import At, Expect, JobSpec, Scenario, ScenarioFault, check_fits
from holdfast.harness.chaos.workload import Python

_WHEN = ("step", "seconds", "random", "point", "in_step", "epoch")


def run(  # noqa: PLR0913  (public)
    fn: Callable[..., Any],
    *args: Any,
    ranks: int = 3,
    spares: int = 0,
    backend: str = "shm",
    faults: Iterable[ScenarioFault] = (),
    seed: int = 0,
    steps: int | None = None,
    compare: bool = True,
    expect: Mapping[str, Any] | None = None,
    limit: float = 60.0,
    repeat: str = "",
    **job: Any,
) -> Result:
    """Call `fn(session, *args)` on every rank of a job, inject `faults`, and check the run.

    `fn` trains under the `ft.Session` that it is given, as under `holdfast run`; it may be a function of a script
    or test module. With `compare` it is run without faults first, and the results of all ranks must have the bits
    of that run (tensors, arrays, numbers, text, nested). With `expect={"weights": "any"}`, or without `compare`,
    they must have the same bits on all ranks; with `{"weights": "unchecked"}` they are compared with nothing.
    `steps`: how many there are, for faults at random steps. `expect` and `job` are the keys of the tables [expect]
    and [job] of a scenario file. Raises ValueError for faults that cannot be injected, `NoDigest` for results that
    cannot be compared, and the errors of starting the job; a bad outcome raises nothing (see `check`).
    """
    expected = msgspec.convert({"weights": "identical" if compare else "any", **(expect or {})}, Expect)
    spec = msgspec.convert({"ranks": ranks, "spares": spares, "backend": backend, **job}, JobSpec)
    name = getattr(fn, "__name__", type(fn).__name__)
    scenario = Scenario(
        name=name.strip("<>").replace("_", "-").lower() or "function",
        title=f"{name} under chaos",
        summary="",
        workload=Python(target=f"{getattr(fn, '__module__', '?')}:{name}", steps=steps),
        job=spec,
        faults=tuple(faults),
        expect=expected,
        limit=limit,
    )
    for fault_ in scenario.faults:
        check_fits(scenario, fault_)
    return ScenarioRunner().run(scenario, seed, compare=compare, body=fn, args=args, repeat=repeat)


def run_scenario(scenario: Scenario, seed: int = 0, *, compare: bool = True, minutes: float | None = None) -> Result:
    """Run a scenario, as `holdfast chaos run` does."""
    return ScenarioRunner().run(scenario, seed, compare=compare, minutes=minutes)


# Faults -----------------------------------------------------------------------------------------------------


def fault(kind: str, *, lasts: float | None = None, **keys: Any) -> ScenarioFault:
    """A fault of type `kind` (`holdfast chaos list`); `keys` say when (`step`, `seconds`, `point` ...) and how.

    A name that both could have is a key of the type: `seconds` of a delay. Raises ValueError with what is allowed.
    """
    known = fault_types()
    if kind not in known:
        raise ValueError(f"there is no fault type {kind!r}; there are {', '.join(sorted(known))}")
    own = known[kind].__struct_encode_fields__
    when = {name: keys.pop(name) for name in _WHEN if name in keys and name not in own}
    if "rank" in keys and "point" in when:
        when["rank"] = keys.pop("rank")
    try:
        return ScenarioFault(
            type=kind, at=msgspec.convert(when, At), what=msgspec.convert(keys, known[kind]), lasts=lasts
        )
    except msgspec.ValidationError as error:
        raise ValueError(
            f"fault {kind!r}: {error}; its keys are {', '.join(own)}, and when: {', '.join(_WHEN)}"
        ) from None


def kill(who: Any = None, **when: Any) -> ScenarioFault:
    """SIGKILL of a process or more: a rank, "random", "coordinator", "last", "spare", "joiner", or a list of them."""
    return fault("kill", who=who, **when)


def pause(who: Any = None, *, lasts: float | None = None, **when: Any) -> ScenarioFault:
    """SIGSTOP; SIGCONT after `lasts` seconds, if given."""
    return fault("pause", who=who, lasts=lasts, **when)
