"""How a process finds its job: the variables of the contract, those of schedulers, and the address it listens on."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import ft
from holdfast.comms.transport.base import Peer
from holdfast.ft import settings
from holdfast.ft.listen_address import (
    AddressNeeded,
    LocalAddress,
    NoSuchInterface,
    address_of,
    choose_address,
    local_addresses,
)
from holdfast.ft.membership.state_machine import refusal_reason
from holdfast.ft.membership.view import Job, Member, View
from holdfast.ft.registers import RegisterAway, sqlite
from holdfast.ft.schedulers import Placement, placement
from support.samples.tally import contract_in

# -- schedulers

TORCHRUN = {"TORCHELASTIC_RUN_ID": "r", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "7",
    "SLURMD_NODENAME": "n3",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "5",
}
POD = {"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "training-3"}
IN_SLURM: dict[str, Any] = {"node": "n3", "nodes": 3, "size": 5}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Placement()),
        ({"RANK": "0", "WORLD_SIZE": "2", "SLURM_JOB_ID": "7", "SLURM_NNODES": "4"}, Placement()),
        (
            TORCHRUN,
            Placement("torchrun", nodes=2, size=8, job="torchrun-r", spread=True, ends_together=True),
        ),
        (
            TORCHRUN
            | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
            | {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "3"},
            Placement("torchrun", nodes=1, size=1, job="torchrun-r.2", ends_together=True),
        ),
        (SLURM, Placement("SLURM", **IN_SLURM, job="slurm-7", spread=True)),
        (SLURM | {"SLURM_RESTART_COUNT": "1"}, Placement("SLURM", **IN_SLURM, job="slurm-7.1", spread=True)),
        (SLURM | {"PMI_RANK": "4", "PMI_SIZE": "5"}, Placement("SLURM", **IN_SLURM, job="slurm-7", spread=True)),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "6", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            Placement("PMI", size=6, spread=True),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
            | {"PMIX_HOSTNAME": "n1"},
            Placement("Open MPI", "n1", size=2),
        ),
        (POD, Placement("Kubernetes", "training-3", spread=True)),
        (
            POD | {"JOBSET_NAME": "set", "JOBSET_RESTART_ATTEMPT": "1"},
            Placement("Kubernetes", "training-3", job="set.1", spread=True),
        ),
        (POD | TORCHRUN, placement(TORCHRUN)),
    ],
)
def test_the_variables_of_a_scheduler_say_where_a_process_is(environ: Mapping[str, str], expected: Placement) -> None:
    assert placement(environ) == expected


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match="WORLD_SIZE='many' in the environment is not a number of a scheduler"):
        placement(TORCHRUN | {"WORLD_SIZE": "many"})


@given(st.dictionaries(st.sampled_from([*TORCHRUN, *SLURM, *POD, "PMI_RANK"]), st.text(max_size=12)))
def test_whatever_the_variables_hold_there_is_a_placement_or_a_value_error(environ: dict[str, str]) -> None:
    try:
        found = placement(environ)
    except ValueError as error:
        assert "in the environment is not a number" in str(error)
    else:
        assert found.size is None or found.size >= 0


# -- the contract


def settle(tmp_path: Path, **given: Any) -> settings.Settings:
    key = contract_in(tmp_path)["key_file"]
    arguments: dict[str, Any] = dict.fromkeys(("backend", "size", "min_size", "shards", "device", "job"))
    return settings.settle(
        **{**arguments, "register": "memory://x", "key_file": key, "timeouts": ft.Timeouts(), **given}
    )


def test_arguments_come_before_variables_and_these_before_the_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (SLURM | {"SLURM_STEP_NUM_NODES": "1"}).items():
        monkeypatch.setenv(name, value)
    found = settle(tmp_path)
    assert (found.name, found.size, found.scheduled, found.host) == ("slurm-7", 0, 5, "127.0.0.1")
    assert settings.candidate_job(found, None).size == 5
    monkeypatch.setenv("HOLDFAST_JOB", "mine")
    monkeypatch.setenv("HOLDFAST_SIZE", "4")
    monkeypatch.setenv("HOLDFAST_INTERFACE", "127.0.0.0/8")
    found = settle(tmp_path)
    assert (found.name, found.size, found.host) == ("mine", 4, "127.0.0.1")
    found = settle(tmp_path, job="other", size=3, interface="lo", host=None)
    assert (found.name, found.size, found.host) == ("other", 3, "127.0.0.1")
    assert settle(tmp_path, host="127.0.0.2").host == "127.0.0.2"
    with pytest.raises(ValueError, match="both say where to listen"):
        ft.Session(**contract_in(tmp_path, host="127.0.0.1", interface="lo"))


@pytest.mark.parametrize(
    ("workers", "restarts", "warned"), [("4", "0", True), ("1", "3", True), ("1", "0", False), ("1", "", False)]
)
def test_torchrun_is_warned_of_where_it_would_end_or_restart_healthy_ranks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    workers: str,
    restarts: str,
    warned: bool,
) -> None:
    settings._warn_of_torchrun.cache_clear()
    agent = {"WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers, "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    for name, value in (TORCHRUN | agent | {"TORCHELASTIC_MAX_RESTARTS": restarts}).items():
        monkeypatch.setenv(name, value)
    assert settle(tmp_path).scheduled == int(workers)
    assert ("--nproc-per-node 1 --max-restarts 0" in caplog.text) == warned


# -- addresses

ETH0 = LocalAddress("eth0", ipaddress.ip_address("10.1.0.5"))
ETH0_6 = LocalAddress("eth0", ipaddress.ip_address("fd00::5"))
IB0 = LocalAddress("ib0", ipaddress.ip_address("fd01::5"))
LINK = LocalAddress("ib0", ipaddress.ip_address("fe80::1"))
LO = LocalAddress("lo", ipaddress.ip_address("127.0.0.1"))
HERE = (LO, LINK, ETH0_6, ETH0, IB0)


@pytest.mark.parametrize(
    ("interface", "address"),
    [
        ("eth0", "10.1.0.5"),
        ("ib0", "fd01::5"),
        ("lo", "127.0.0.1"),
        ("10.1.0.0/16", "10.1.0.5"),
        ("fd00::/64", "fd00::5"),
        ("fd00::5", "fd00::5"),
        ("10.1.0.5", "10.1.0.5"),
    ],
)
def test_an_interface_a_network_or_an_address_is_chosen(interface: str, address: str) -> None:
    assert address_of(interface, HERE) == address


@pytest.mark.parametrize("interface", ["eth1", "10.2.0.0/16", "10.1.0.6", "fe80::1", "fe80::/10"])
def test_what_is_not_there_is_refused_with_what_there_is(interface: str) -> None:
    with pytest.raises(NoSuchInterface, match=re.escape("this host has eth0 fd00::5, eth0 10.1.0.5, ib0 fd01::5")):
        address_of(interface, HERE)


def test_loopback_serves_one_host_alone() -> None:
    assert choose_address("", "", ()) == "127.0.0.1"
    with pytest.raises(AddressNeeded, match=r"it is on 3 hosts, so an address .* eth0 10.1.0.5") as needed:
        choose_address("", "it is on 3 hosts", HERE)
    assert needed.value.available == ("eth0 fd00::5", "eth0 10.1.0.5", "ib0 fd01::5")
    with pytest.raises(ValueError, match=r"'10.1.0.5/99' is not a network"):
        address_of("10.1.0.5/99", HERE)


def test_the_addresses_are_those_that_can_be_bound() -> None:
    found = local_addresses()
    assert any(str(each.address) == "127.0.0.1" for each in found)
    for each in found:
        if not each.address.is_link_local:
            with socket.socket(socket.AF_INET6 if each.address.version == 6 else socket.AF_INET) as probe:
                probe.bind((str(each.address), 0))


def member(name: str, host: str, address: str) -> Member:
    return Member(name, address, Peer(host, 1, 1))


def test_members_on_several_machines_do_not_listen_on_loopback() -> None:
    job = Job("job", 2, 1, 2, ("gloo",))
    here, there = member("a", "boot1/pid", "10.0.0.1:1"), member("b", "boot2/pid", "10.0.0.2:1")
    view = View(1, "forming", (here,), job, "")
    assert refusal_reason(there, job, frozenset(), view) is None
    hidden = member("b", "boot2/pid", "[::1]:9")
    assert "this process listens on [::1]:9" in str(refusal_reason(hidden, job, frozenset(), view))
    view = View(1, "forming", (member("a", "boot1/pid", "127.0.0.1:7"),), job, "")
    assert "member a on another host listens on 127.0.0.1:7" in str(refusal_reason(there, job, frozenset(), view))
    simulated = member("c", "boot1/pid/other", "127.0.0.1:8")
    assert refusal_reason(simulated, job, frozenset(), view) is None


# -- file systems that hosts share


def test_sqlite_on_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sqlite.network_file_system(tmp_path) is None
    kind = sqlite._type_of(tmp_path)
    monkeypatch.setitem(sqlite.NETWORK_FILE_SYSTEMS, kind, "NFS")
    with pytest.raises(RegisterAway, match=r"is on NFS, where sqlite is not safe: .* use etcd://"):
        ft.Session(**contract_in(tmp_path, size=1))
    assert not (tmp_path / "job.sqlite").exists()
