"""A small Llama, sharded with `fully_shard` (FSDP2), trained on while ranks die: a job of `holdfast run`.

    holdfast run -n 3 --spares 1 examples/train_fsdp2.py --steps 20 --kill-rank 1 --kill-step 8

Every rank's shards are copied to a neighbour with each committed step. The killed rank's come back from there, to the
spare in its place, or without a spare to those that are left; if the copies died too, from the last checkpoint
(`--checkpoint DIR`). The losses are the same to the last bit as without the kill, on any number of ranks.

With `--replicas 2` the ranks are two replicas of each shard (HSDP) for as long as their number is even; then a dead
rank's shards come from its replica, and `--copies 0` saves the memory and the time of copies.

The model and the text are in `small_llama.py`. Needs transformers: pip install 'holdfast[rl]'.
"""

import functools
import logging
from typing import Any

import torch
from small_llama import SHARDS, arguments, batch, checksum, end_once, report, small_llama
from torch.distributed.fsdp import fully_shard

from holdfast import ft


def laid_out(size: int, replicas: int) -> dict[str, int]:
    """A mesh of `size` ranks: so many replicas of each shard, or one if that does not come out even."""
    if size % replicas:
        replicas = 1
    return {"replicate": replicas, "shard": size // replicas}


def build(mesh: Any) -> dict[str, Any]:
    """Model and optimizer over the ranks of this epoch: the same every time, whatever state they then get."""
    model = small_llama()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=3e-3)}


def train(
    session: ft.Session,
    steps: int,
    kill_rank: int = -1,
    kill_step: int = -1,
    checkpoint: str = "",
    replicas: int = 1,
    copies: int = 1,
) -> str:
    """Train; a checksum of all weights at the end."""
    torch.set_num_threads(1)
    shape = None if replicas == 1 else functools.partial(laid_out, replicas=replicas)
    things = session.attach_sharded(build, copies=copies, mesh=shape)
    if checkpoint:
        session.checkpoints(checkpoint, every=5)
    first: ft.Attempt | None = None
    weights = ""
    for attempt in session.steps(steps):
        first = first or attempt
        with attempt:
            model, optimizer = things["model"], things["optimizer"]
            sums = ft.ShardSums(attempt)
            sums.fully_sharded(model)
            optimizer.zero_grad()
            loss = torch.zeros(1, dtype=torch.float64)
            for turn in sums.turns():
                tokens = batch(attempt.step, turn.shard)
                part = model(input_ids=tokens, labels=tokens).loss / attempt.total_shards
                end_once(attempt, first, kill_rank, kill_step)
                part.backward()
                loss += part.detach() * turn.counts
            optimizer.step()
            attempt.comm.all_reduce(loss, reproducible=True)
            if attempt.step == steps - 1:
                weights = checksum([parameter.full_tensor() for parameter in model.parameters()])
        if attempt.committed and (attempt.rank == 0 or first is attempt):
            report(attempt, loss)
    print(f"weights {weights}", flush=True)
    return weights


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--checkpoint", default="", help="a directory for checkpoints, one every 5 steps")
    parser.add_argument("--replicas", type=int, default=1, help="how many ranks have the same shards (HSDP)")
    parser.add_argument("--copies", type=int, default=1, help="how many neighbours keep copies of a rank's shards")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with ft.Session(shards=SHARDS) as session:
        train(session, **vars(asked))


if __name__ == "__main__":
    main()
