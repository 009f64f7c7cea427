"""`holdfast tune`: the two constants of the cost model, measured once, kept, checked, and the same on all ranks."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms import Communicator, CorruptData
from holdfast.comms.algorithms.message_passing import cost, tuning
from holdfast.comms.transport.base import Link
from holdfast.harness import LocalCluster
from holdfast.harness.bench import tune
from support.programs.forked_programs import said, said_as_json


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own; ranks inherit it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@given(st.floats(1e-7, 1e-2), st.floats(1e6, 1e12))
def test_the_fit_finds_the_constants_of_its_data(latency: float, bandwidth: float) -> None:
    link = Link(latency, bandwidth)
    found, rate, error = tune.fit({nbytes: link.seconds(1, nbytes) for nbytes in tune.SIZES})
    again = Link(found, rate)
    assert error < 0.2
    for nbytes in tune.SIZES:
        assert again.seconds(1, nbytes) == pytest.approx(link.seconds(1, nbytes), rel=0.2)


def test_constants_are_measured_once_kept_shown_and_forgotten(cache: Path) -> None:
    assert tuning.load() == tuning.Tuning()
    measured = said("tune", "--backend", "ucx,shm")
    assert measured.exit_code == 0 and "shm has nothing to choose" in measured.output
    found = tuning.load().links["ucx/shm"]
    assert 1e-8 < found.latency < 0.1 and 1e6 < found.bandwidth < 1e13
    shown = said_as_json("tune", "--show")
    assert shown["file"] == str(tuning.path())
    assert shown["links"]["ucx/shm"]["latency"] == found.latency and shown["links"]["mpi"]["measured"] is None
    choice = next(c for c in shown["links"]["ucx/shm"]["choices"] if c["op"] == "all_reduce" and c["ranks"] == 4)
    assert choice["algorithm"] == min(choice["seconds"], key=choice["seconds"].__getitem__)
    assert "all_reduce   2 ranks: doubling" in said("tune", "--show").output
    assert said("tune", "--forget").exit_code == 0 and not tuning.path().exists()
    assert list(cache.rglob("tune-*")) == []


def test_all_ranks_use_what_rank_0_measured_or_fail_as_it_does(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has a cache of its own here, as it would on another machine. The error names the path, also a long one."""
    tuning.save(tuning.Tuning(links={"ucx/shm": tuning.Measured(1.5, 2.5, "2026-01-01", 0.1)}))
    broken = cache.joinpath(*["d" * 200] * 8)
    monkeypatch.setenv("XDG_CACHE_HOME", str(broken))
    tuning.path().parent.mkdir(parents=True)
    tuning.path().write_text("{")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "elsewhere"))

    def body(comm: Communicator, of_rank_0: Path) -> Link:
        import os

        if comm.rank == 0:
            os.environ["XDG_CACHE_HOME"] = str(of_rank_0)
        with comm.split([0, 1]) as again:
            link: Link = again._transport._link  # type: ignore[attr-defined]
        return link

    with LocalCluster(2, "ucx", timeout=20.0) as cluster:
        assert cluster.run(body, cache) == [Link(1.5, 2.5, "ucx/shm")] * 2
        outcomes = cluster.outcomes(body, broken)
    assert all(isinstance(outcome.error, CorruptData) for outcome in outcomes)
    assert all("holdfast tune --forget" in str(outcome.error) for outcome in outcomes)


def test_defaults_hold_where_nothing_was_measured_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "holdfast.comms"):
        assert cost.here(Link(2e-6, 8e9, "mpi")) == Link(2e-6, 8e9, "mpi")
    assert "defaults" in caplog.text and "holdfast tune" in caplog.text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"version": 2, "links": {}}',
        b'{"version": 1, "links": {"mpi": {"latency": -1, "bandwidth": 1, "measured": "", "worst_error": 0}}}',
        b'{"version": 1, "links": {"mpi": {"latency": 1}}}',
        b'{"version": 1, "links": {}, "more": 1}',
    ],
)
def test_a_broken_cache_is_an_error_that_says_what_to_do(content: bytes) -> None:
    file = tuning.path()
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    with pytest.raises(CorruptData, match="holdfast tune --forget"):
        cost.here(Link(2e-6, 8e9, "mpi"))
    shown = said("tune", "--show")
    assert shown.exit_code == 1 and str(file.name) in shown.output.replace("\n", "")
    assert said("tune", "--forget").exit_code == 0 and tuning.load() == tuning.Tuning()
