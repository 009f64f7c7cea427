"""Hooks on the ops of one communicator (`comm.hooks`), and three that are often wanted.

    handle = comm.hooks.before_op(lambda event: print(event.op, event.inputs))
    handle.remove()

They are the hooks of plugins (`before_op`, `after_op`, `on_abort`) for one communicator, and get the same events:
`OpEvent`, with the op's tensors, and `AbortEvent`. A plugin's hooks see every communicator of the process.

`before_op` runs in the thread that issues the op, `after_op` where the op ran: for an asynchronous op in the
communicator's own thread. `after_op` follows each `before_op` once. A hook cannot call ops of the communicator it
watches; a `split` of it can.

An op whose hook raises fails with that error, and the communicator lives: if `before_op` raised, no byte has moved, and
the rank may issue the op again, for which the other ranks wait; if `after_op` raised, the op is complete.

While there is no hook, ops cost what they cost without this module.
"""

from holdfast.comms.hooks.checks import OpLog, check_finite, compare_checksums
from holdfast.comms.hooks.hooks import AbortHook, HookHandle, Hooks, OpHook

__all__ = ["AbortHook", "HookHandle", "Hooks", "OpHook", "OpLog", "check_finite", "compare_checksums"]
