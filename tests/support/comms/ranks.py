"""Tests whose body is called on each rank of a cluster, and clusters that the tests of a module share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from holdfast.harness import LocalCluster

Test = Callable[..., None]
MPI = pytest.param("mpi", marks=pytest.mark.thorough)
"""Four times as dear as shm. `tests/backends/test_mpi.py` and the conformance kit have it in the first tier."""


def second_tier(*backends: str) -> list[Any]:
    """Parameters that run in the second tier alone."""
    return [pytest.param(backend, marks=pytest.mark.thorough) for backend in backends]


@contextmanager
def running(size: int, backend: str, checks: str | None = None, **options: Any) -> Iterator[LocalCluster]:
    """A cluster whose processes have started; with `checks` "0" its ops take the fast paths."""
    with pytest.MonkeyPatch.context() as patch:
        if checks is not None:
            patch.setenv("HOLDFAST_CHECK", checks)
        with LocalCluster(size, backend, **options) as cluster:
            cluster.warm_up()
            yield cluster


def each_of(*names: str) -> Any:
    """A fixture that has each of the names in turn."""

    @pytest.fixture(params=names)
    def name(request: pytest.FixtureRequest) -> str:
        return str(request.param)

    return name


def shared_ranks(size: int, *backends: Any, timeout: float = 60.0, **options: Any) -> Any:
    """A fixture of a module: a cluster over each backend in turn. "shm-1" is one rank, whatever the `size`."""

    @pytest.fixture(scope="module", params=backends)
    def ranks(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
        backend, _, own = str(request.param).partition("-")
        with running(int(own or size), backend, timeout=timeout, **options) as cluster:
            yield cluster

    return ranks


def on_ranks_of(fixture: str) -> Callable[[Test], Test]:
    """A test of `body(comm, ...)`, which each rank of the fixture's cluster calls; more parameters are fixtures."""

    def decorate(body: Test) -> Test:
        names = _parameters(body)[1:]

        def test(**fixtures: Any) -> None:
            fixtures[fixture].run(body, *(fixtures[name] for name in names))

        return as_test(test, body, [fixture, *names])

    return decorate


def on_ranks(
    size: int, *backends: Any, of: str = "backend", killed: Container[int] = (), **options: Any
) -> Callable[[Test], Test]:
    """The same with a new cluster over each of the backends; without any, over that of the fixture `of`.

    The ranks in `killed` may die; the others must return.
    """

    def decorate(body: Test) -> Test:
        def test(**fixtures: Any) -> None:
            with running(size, fixtures[of], **options) as cluster:
                arguments = [fixtures[name] for name in _parameters(body)[1:]]
                if not killed:
                    cluster.run(body, *arguments)
                    return
                for end in cluster.outcomes(body, *arguments):
                    if end.error and end.rank not in killed:
                        raise end.error

        made = as_test(test, body, [of, *_parameters(body)[1:]])
        return pytest.mark.parametrize(of, backends)(made) if backends else made

    return decorate


def _parameters(body: Test) -> list[str]:
    return list(inspect.signature(body).parameters)


def as_test(test: Test, body: Test, fixtures: Iterable[str]) -> Test:
    """`test`, which takes these fixtures, under the name of `body`."""
    names = dict.fromkeys(fixtures)
    signature = inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names])
    test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
    test.__signature__ = signature  # type: ignore[attr-defined]
    return test
