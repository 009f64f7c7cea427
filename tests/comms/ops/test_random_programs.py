"""Random programs of ops with random shapes, dtypes and layouts give equal bits on every backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.harness import LocalCluster
from support.samples import programs

PROGRAMS = 4
"""How many programs one communicator runs, since connecting takes longer than most programs."""

quick = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


Outcome = Callable[[str, int, list[list[programs.Step]]], list[object]]


@pytest.fixture
def outcome() -> Iterator[Outcome]:
    """A function that runs programs, on clusters that stay alive from example to example."""
    with ExitStack() as opened:

        @cache
        def cluster(backend: str, size: int) -> LocalCluster:
            return opened.enter_context(LocalCluster(size, backend, timeout=90.0))

        def run(backend: str, size: int, several: list[list[programs.Step]]) -> list[object]:
            return list(cluster(backend, size).run(lambda comm: [programs.run(comm, each) for each in several]))

        yield run


def several(size: int) -> st.SearchStrategy[list[list[programs.Step]]]:
    return st.lists(programs.programs(size), min_size=1, max_size=PROGRAMS)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.thorough), 3])
@settings(quick, max_examples=8)
@given(data=st.data())
def test_any_program_gives_the_same_on_every_backend(
    process_backend: str, outcome: Outcome, size: int, data: st.DataObject
) -> None:
    given_programs = data.draw(several(size))
    expected = outcome("inproc", size, given_programs)
    assert outcome(process_backend, size, given_programs) == expected


@pytest.mark.thorough
@settings(quick, max_examples=2)
@given(given_programs=several(8))
def test_any_program_gives_the_same_with_eight_processes(
    process_backend: str, outcome: Outcome, given_programs: list[list[programs.Step]]
) -> None:
    expected = outcome("inproc", 8, given_programs)
    assert outcome(process_backend, 8, given_programs) == expected


@settings(quick, max_examples=25)
@given(size=st.integers(1, 8), data=st.data())
def test_any_program_gives_the_same_in_each_run_with_one_to_eight_ranks(
    outcome: Outcome, size: int, data: st.DataObject
) -> None:
    given_programs = data.draw(several(size))
    first = outcome("inproc", size, given_programs)
    assert outcome("inproc", size, given_programs) == first
    for number, program in enumerate(given_programs):
        for place, step in enumerate(program):
            if step.op == "all_reduce":  # every rank has the same
                assert len({repr(of_rank[number][place]) for of_rank in first}) == 1  # type: ignore[index]
