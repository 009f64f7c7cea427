"""A small Llama, sharded with `fully_shard` (FSDP2), trained on while ranks die: a job of `holdfast run`.

    holdfast run -n 3 --spares 1 examples/train_fsdp2.py --steps 20 --kill-rank 1 --kill-step 8

Every rank's shards are copied to a neighbour with each committed step. The killed rank's come back from there, to the
spare in its place, or without a spare to those that are left; if the copies died too, from the last checkpoint
(`--checkpoint DIR`). The losses are the same to the last bit as without the kill, on any number of ranks.

With `--replicas 2` the ranks are two replicas of each shard (HSDP) for as long as their number is even; then a dead
rank's shards come from its replica, and `--copies 0` saves the memory and the time of copies.

Needs transformers: pip install 'holdfast[rl]'.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import signal
from typing import Any

import torch
import xxhash
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from holdfast import ft

SHARDS = 6
"""Parts of the global batch: fixed, so that what is computed does not depend on how many ranks there are."""
TEXT = torch.tensor(list(b"what was promised will be kept, and what is kept was promised; so it holds. " * 4))


def laid_out(size: int, replicas: int) -> dict[str, int]:
    """A mesh of `size` ranks: so many replicas of each shard, or one if that does not come out even."""
    if size % replicas:
        replicas = 1
    return {"replicate": replicas, "shard": size // replicas}


def build(mesh: Any) -> dict[str, Any]:
    """Model and optimizer over the ranks of this epoch: the same every time, whatever state they then get."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=32,
        )
    )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=3e-3)}


def batch(step: int, shard: int) -> torch.Tensor:
    """Pieces of the text (4, 24) for one shard of one step: the same wherever they are made."""
    generator = torch.Generator().manual_seed(1000 * step + shard)
    starts = torch.randint(0, TEXT.numel() - 24, (4,), generator=generator)
    return torch.stack([TEXT[start : start + 24] for start in starts.tolist()])


def fingerprint(model: torch.nn.Module) -> str:
    """A checksum of all weights; collective."""
    whole = [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]
    return xxhash.xxh3_64_hexdigest(torch.cat([each.detach().flatten() for each in whole]).numpy().data)


def train(
    session: ft.Session,
    steps: int,
    kill_rank: int = -1,
    kill_step: int = -1,
    checkpoint: str = "",
    replicas: int = 1,
    copies: int = 1,
) -> str:
    """Train; the fingerprint of the weights at the end."""
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
                if (
                    (attempt.rank, attempt.step) == (kill_rank, kill_step)
                    and attempt.epoch == first.epoch
                    and first.step < kill_step
                ):
                    os.kill(os.getpid(), signal.SIGKILL)
                part.backward()
                loss += part.detach() * turn.counts
            optimizer.step()
            attempt.comm.all_reduce(loss, reproducible=True)
            if attempt.step == steps - 1:
                weights = fingerprint(model)
        if attempt.committed and (attempt.rank == 0 or first is attempt):
            print(
                f"step {attempt.step}: loss {loss.item():.9f} (rank {attempt.rank} of {attempt.comm.size})", flush=True
            )
    print(f"weights {weights}", flush=True)
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kill-rank", type=int, default=-1, help="this rank ends itself with SIGKILL ...")
    parser.add_argument("--kill-step", type=int, default=-1, help="... in the middle of this step")
    parser.add_argument("--checkpoint", default="", help="a directory for checkpoints, one every 5 steps")
    parser.add_argument("--replicas", type=int, default=1, help="how many ranks have the same shards (HSDP)")
    parser.add_argument("--copies", type=int, default=1, help="how many neighbours keep copies of a rank's shards")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with ft.Session(shards=SHARDS) as session:
        train(
            session,
            asked.steps,
            asked.kill_rank,
            asked.kill_step,
            asked.checkpoint,
            replicas=asked.replicas,
            copies=asked.copies,
        )


if __name__ == "__main__":
    main()
