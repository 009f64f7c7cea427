"""A job with Monarch actors as members, each with a session in a process of its own.

    export HOLDFAST_JOB=job HOLDFAST_REGISTER=sqlite://$PWD/job.sqlite HOLDFAST_KEY_FILE=job.key HOLDFAST_SIZE=2
    python examples/stack/monarch/sessions.py [ACTORS STEPS]

Each actor has procs of its own: a call to a mesh fails as a whole when one of its processes dies.
"""

import asyncio
import os
import sys
import time
from typing import Any

os.environ.setdefault("MONARCH_FILE_LOG", "error")

import monarch.actor
import torch
from monarch.actor import Actor, endpoint, this_host

from holdfast import ft


class JobMember(Actor):
    """One member of the job, from the call of `train` to its return."""

    @endpoint
    def train(self, steps: int) -> str:
        with ft.Session() as session:
            for attempt in session.steps(steps):
                with attempt:
                    total = torch.ones(1)
                    attempt.comm.all_reduce(total)
                    time.sleep(0.02)  # the work of a step
            return f"rank {session.rank} of {session.size} finished in epoch {session.epoch}"


async def end_of(trainer: Any, steps: int) -> str:
    """What a trainer returns, or how it died."""
    try:
        return str(await trainer.train.call_one(steps))
    except Exception as error:
        return f"lost: {type(error).__name__}"


async def main(actors: int, steps: int) -> None:
    monarch.actor.unhandled_fault_hook = lambda failure: None  # or the death of an actor ends this process
    procs = [this_host().spawn_procs(per_host={"trainer": 1}, name=f"trainer{number}") for number in range(actors)]
    trainers = [each.spawn("trainer", JobMember) for each in procs]
    for end in sorted(await asyncio.gather(*(end_of(each, steps) for each in trainers))):
        print(end, flush=True)


if __name__ == "__main__":
    asyncio.run(main(*(int(word) for word in sys.argv[1:] or ("2", "100"))))
    os._exit(0)  # procs that died keep Monarch's own end waiting
