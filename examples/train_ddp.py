"""A small Llama, trained with DistributedDataParallel on while ranks die: a job of `holdfast run`.

    holdfast run -n 3 --spares 1 examples/train_ddp.py --steps 20 --kill-rank 1 --kill-step 8

Every rank has the whole state, so the spare that takes the killed rank's place gets it from the others' memory. The
weights at the end are the same to the last bit as without the kill, on any number of ranks.

Needs transformers: pip install 'holdfast[rl]'.
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
import xxhash
from transformers import LlamaConfig, LlamaForCausalLM

from holdfast import ft

SHARDS = 6
"""Parts of the global batch: fixed, so that what is computed does not depend on how many ranks there are."""
TEXT = torch.tensor(list(b"what was promised will be kept, and what is kept was promised; so it holds. " * 4))


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=32,
        )
    )


def batch(step: int, shard: int) -> torch.Tensor:
    """Pieces of the text (4, 24) for one shard of one step: the same wherever they are made."""
    generator = torch.Generator().manual_seed(1000 * step + shard)
    starts = torch.randint(0, TEXT.numel() - 24, (4,), generator=generator)
    return torch.stack([TEXT[start : start + 24] for start in starts.tolist()])


def fingerprint(model: torch.nn.Module) -> str:
    """A checksum of all weights."""
    flat = torch.cat([each.detach().flatten() for each in model.parameters()])
    return xxhash.xxh3_64_hexdigest(flat.numpy().data)


def train(session: ft.Session, steps: int, kill_rank: int = -1, kill_step: int = -1) -> str:
    """Train; the fingerprint of the weights at the end."""
    torch.set_num_threads(1)
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    session.attach("model", model)
    session.attach("optimizer", optimizer)
    first: ft.Attempt | None = None
    for attempt in session.steps(steps):
        first = first or attempt
        with attempt:
            sums = ft.ShardSums(attempt)
            replica = sums.data_parallel(model)  # over this epoch's ranks
            loss = torch.zeros(1, dtype=torch.float64)
            for turn in sums.turns():
                tokens = batch(attempt.step, turn.shard)
                part = replica(input_ids=tokens, labels=tokens).loss / attempt.total_shards
                if (
                    (attempt.rank, attempt.step) == (kill_rank, kill_step)
                    and attempt.epoch == first.epoch
                    and first.step < kill_step
                ):
                    os.kill(os.getpid(), signal.SIGKILL)
                part.backward()
                loss += part.detach() * turn.counts
            attempt.comm.all_reduce(loss, reproducible=True)
        if attempt.committed:
            optimizer.step()
            if attempt.rank == 0 or first is attempt:
                print(
                    f"step {attempt.step}: loss {loss.item():.9f} (rank {attempt.rank} of {attempt.comm.size})",
                    flush=True,
                )
    weights = fingerprint(model)
    print(f"weights {weights}", flush=True)
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kill-rank", type=int, default=-1, help="this rank ends itself with SIGKILL ...")
    parser.add_argument("--kill-step", type=int, default=-1, help="... in the middle of this step")
    asked = parser.parse_args()
    with ft.Session(shards=SHARDS) as session:
        train(session, asked.steps, asked.kill_rank, asked.kill_step)


if __name__ == "__main__":
    main()
