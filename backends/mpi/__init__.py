"""`mpi`: Open MPI through mpi4py, between processes that mpirun started together. CPU tensors.

ULFM makes it abortable (`Comm.Revoke`), so mpirun must be told `--with-ft ulfm`. MPI itself is loaded when the first
communicator connects, never before: importing `mpi4py.MPI` initialises it.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from holdfast.backends.mpi.world import prepare, start
from holdfast.comms.arithmetic import REDUCIBLE
from holdfast.comms.errors import Unsupported
from holdfast.comms.plugins.spec import API_VERSION, Available, BackendInfo, Capabilities, Unavailable, hookimpl
from holdfast.comms.tensors.packing import DTYPES, names
from holdfast.comms.transport.base import Context, Link

if TYPE_CHECKING:
    from holdfast.backends.mpi.transport import MpiTransport

_FAULT_TOLERANCE = "OMPI_MCA_mpi_ft_enable"
"""What `mpirun --with-ft ulfm` sets."""

START = (
    "start under mpirun: mpirun --with-ft ulfm -n N python script.py (as root also --allow-run-as-root), or use the "
    "harness: holdfast run --backend mpi script.py, or LocalCluster(N, 'mpi')"
)


def connect(context: Context) -> MpiTransport:
    """Make an MPI communicator of the context's ranks, in its order; collective."""
    if context.device.type != "cpu":
        raise Unsupported(f"mpi on {context.device}", "use nccl for CUDA tensors, or a CPU device")
    start(context.deadline)
    from holdfast.backends.mpi.transport import MpiTransport

    return MpiTransport(context)


def probe() -> Available | Unavailable:
    """Whether mpi4py is here, and mpirun started this process with fault tolerance."""
    if importlib.util.find_spec("mpi4py") is None:
        return Unavailable("mpi4py is not installed", "pip install 'holdfast[mpi]'")
    version = os.environ.get("OMPI_VERSION", "")
    if "PMIX_RANK" not in os.environ or "OMPI_COMM_WORLD_SIZE" not in os.environ:
        return Unavailable("this process was not started by Open MPI's mpirun", START, needs_launcher=True)
    if os.environ.get(_FAULT_TOLERANCE) != "1":
        return Unavailable("mpirun was started without fault tolerance", START, needs_launcher=True)
    return Available(f"Open MPI {version} under mpirun, {os.environ['OMPI_COMM_WORLD_SIZE']} processes")


@hookimpl
def holdfast_backends() -> list[BackendInfo]:
    return [
        BackendInfo(
            name="mpi",
            api=API_VERSION,
            description="Open MPI with ULFM through mpi4py, between processes started by one mpirun",
            capabilities=Capabilities(
                reduces={"cpu": names(REDUCIBLE)},
                moves={"cpu": names(DTYPES)},
                windows=True,
                atomics=True,
                passive_target="thread",
                launcher="mpirun",
            ),
            probe=probe,
            connect=connect,
            prepare=prepare,
            links=(Link(2e-6, 8e9, "mpi"),),
        )
    ]
