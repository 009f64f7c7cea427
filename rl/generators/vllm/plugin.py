"""What vLLM calls in each of its processes, by the entry point `vllm.general_plugins`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

ENGINE = "holdfast"
"""The name of the weight-transfer engine."""


def register() -> None:
    """Register the weight-transfer engine, and end a process that vLLM started with its parent. Idempotent."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if ENGINE in WeightTransferEngineFactory._registry:
        return
    module = "holdfast.rl.generators.vllm.store_weight_transfer"
    WeightTransferEngineFactory.register_engine(ENGINE, module, "StoreWeightTransfer")
    if multiprocessing.parent_process() is not None:
        threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()


def _end_with_parent() -> None:
    """vLLM's engine would outlive a parent that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
