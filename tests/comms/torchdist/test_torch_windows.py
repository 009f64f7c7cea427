"""Windows and splits of a process group, as torch's own functions ask for them; one body for every transport."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast.comms import RegionGone, Unsupported
from holdfast.comms.plugins.registry import registry
from holdfast.comms.torchdist.process_group import HoldfastProcessGroup
from holdfast.harness import LocalCluster
from support.torch_groups import ENVIRON, in_group


@pytest.fixture(
    scope="module", params=["shm", "gloo", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("ucx", "mpi"))]
)
def two(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    backend = str(request.param)
    if not registry().backend(backend).info.capabilities.windows:
        pytest.skip(f"{backend} announces no windows")
    environ = ENVIRON | {"HOLDFAST_BACKEND": backend}
    with LocalCluster(2, backend, timeout=60.0, environ=environ) as cluster:
        cluster.warm_up()
        yield cluster


def test_a_put_signals_and_a_window_is_registered_again(two: LocalCluster, tmp_path: Path) -> None:
    def body(rank: int, size: int) -> list[list[float]]:
        group: Any = dist.group.WORLD
        assert group.supports_window
        peer, exposed, later = 1 - rank, torch.full((8,), -1.0), torch.zeros(3, 2)
        window = group.new_window(exposed)
        window.put(torch.full((4,), float(rank)), peer, 4 * rank, False).wait()
        window.wait_signal(peer, True).wait()
        got = torch.empty(8)
        window.get(got, peer, 0, True).wait()
        window.signal(peer)
        window.wait_signal(peer)  # the peer has read what this rank holds
        with pytest.raises(ValueError, match="7"):
            window.put(torch.ones(2), peer, 7, False)
        window.tensor_deregister()
        with pytest.raises(RegionGone):
            window.put(torch.ones(1), peer, 0, False)
        window.tensor_register(later, owning=False)
        window.put(torch.ones(3, 2) * (rank + 1), peer, 0, True).wait()
        window.wait_signal(peer, False).wait()
        dist.barrier()
        window.close()
        return [exposed.tolist(), got.tolist(), later.view(-1).tolist()]

    first, second = in_group(two, tmp_path, body)
    assert first == [[-1.0] * 4 + [1.0] * 4, [0.0] * 4 + [-1.0] * 4, [2.0] * 6]
    assert second == [[0.0] * 4 + [-1.0] * 4, [-1.0] * 4 + [1.0] * 4, [1.0] * 6]


def test_a_mapped_tensor_is_the_peers_own_or_is_refused_by_name(two: LocalCluster, tmp_path: Path) -> None:
    def body(rank: int, size: int) -> tuple[str, list[float]]:
        group: Any = dist.group.WORLD
        exposed = torch.zeros(2, 2)
        window = group.new_window(exposed)
        access = window.info.access
        window.map_remote_tensor(rank)[0, 0] = 7.0
        if access == "mapped":
            window.map_remote_tensor(1 - rank)[1, 0] = 40.0 + rank
        else:
            with pytest.raises(Unsupported, match="map"):
                window.map_remote_tensor(1 - rank)
        if hasattr(torch._C._distributed_c10d, "WindowAttr"):
            wanted = "UNIFIED" if access == "mapped" else "SEPARATE"
            assert window.get_attr(1 - rank).access_type.name == wanted
        else:
            with pytest.raises(Unsupported, match="get_attr"):
                window.get_attr(1 - rank)
        dist.barrier()
        window.close()
        return access, exposed.view(-1).tolist()

    for rank, (access, held) in enumerate(in_group(two, tmp_path, body)):
        assert held == [7.0, 0.0, 41.0 - rank if access == "mapped" else 0.0, 0.0]


@pytest.mark.parametrize("backend", ["nccl", "rccl"])
def test_windows_and_symmetric_memory_on_gpus_are_announced_as_not_there(backend: str) -> None:
    info = registry().backend(backend).info
    assert not info.capabilities.windows and not info.capabilities.atomics
    assert "no windows, no symmetric memory" in info.description
    assert not HoldfastProcessGroup.use_pg_for_symm_mem_rendezvous
