"""One cluster of four ranks for all tests of shards that need real process groups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.ft.processes.zygote_client import zygote
from holdfast.harness import LocalCluster
from support.torch_groups import ENVIRON


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    zygote().preload("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "holdfast.comms.torchdist")
    with LocalCluster(4, backend="shm", environ=ENVIRON) as found:
        yield found
