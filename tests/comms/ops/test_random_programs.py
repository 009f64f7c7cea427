"""Random programs of ops with random shapes, dtypes and layouts give equal bits on every backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.comms import Communicator
from holdfast.harness import LocalCluster
from support.samples import programs

PROGRAMS = 4
"""How many programs one communicator runs, since connecting takes longer than most programs."""

quick = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


class Clusters:
    """Clusters that stay alive from example to example."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], LocalCluster] = {}

    def outcome(self, backend: str, size: int, several: list[list[programs.Step]]) -> list[object]:
        cluster = self._open.get((backend, size))
        if cluster is None:
            cluster = self._open[backend, size] = LocalCluster(size, backend, timeout=90.0)

        def body(comm: Communicator, several: list[list[programs.Step]]) -> list[object]:
            return [programs.run(comm, program) for program in several]

        return list(cluster.run(body, several))

    def close(self) -> None:
        for cluster in self._open.values():
            cluster.close()


@pytest.fixture
def clusters() -> Iterator[Clusters]:
    found = Clusters()
    yield found
    found.close()


def several(size: int) -> st.SearchStrategy[list[list[programs.Step]]]:
    return st.lists(programs.programs(size), min_size=1, max_size=PROGRAMS)


@pytest.mark.parametrize("size", [2, 3])
@settings(quick, max_examples=8)
@given(data=st.data())
def test_any_program_gives_the_same_on_every_backend(
    process_backend: str, clusters: Clusters, size: int, data: st.DataObject
) -> None:
    given_programs = data.draw(several(size))
    expected = clusters.outcome("inproc", size, given_programs)
    assert clusters.outcome(process_backend, size, given_programs) == expected


@pytest.mark.thorough
@settings(quick, max_examples=2)
@given(given_programs=several(8))
def test_any_program_gives_the_same_with_eight_processes(
    process_backend: str, clusters: Clusters, given_programs: list[list[programs.Step]]
) -> None:
    expected = clusters.outcome("inproc", 8, given_programs)
    assert clusters.outcome(process_backend, 8, given_programs) == expected


@settings(quick, max_examples=25)
@given(size=st.integers(1, 8), data=st.data())
def test_any_program_gives_the_same_in_each_run_with_one_to_eight_ranks(
    clusters: Clusters, size: int, data: st.DataObject
) -> None:
    given_programs = data.draw(several(size))
    first = clusters.outcome("inproc", size, given_programs)
    assert clusters.outcome("inproc", size, given_programs) == first
    for number, program in enumerate(given_programs):
        for place, step in enumerate(program):
            if step.op == "all_reduce":  # every rank has the same
                assert len({repr(of_rank[number][place]) for of_rank in first}) == 1  # type: ignore[index]
