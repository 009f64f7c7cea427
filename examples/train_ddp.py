"""A small Llama, trained with DistributedDataParallel on while ranks die: a job of `holdfast run`.

    holdfast run -n 3 --spares 1 examples/train_ddp.py --steps 20 --kill-rank 1 --kill-step 8

Every rank has the whole state, so the spare that takes the killed rank's place gets it from the others' memory. The
weights at the end are the same to the last bit as without the kill, on any number of ranks.

The model and the text are in `small_llama.py`. Needs transformers: pip install 'holdfast[rl]'.
"""

import torch
from small_llama import SHARDS, arguments, batch, checksum, end_once, report, small_llama

from holdfast import ft


def train(session: ft.Session, steps: int, kill_rank: int = -1, kill_step: int = -1) -> str:
    """Train; a checksum of all weights at the end."""
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
                end_once(attempt, first, kill_rank, kill_step)
                part.backward()
                loss += part.detach() * turn.counts
            attempt.comm.all_reduce(loss, reproducible=True)
        if attempt.committed:
            optimizer.step()
            if attempt.rank == 0 or first is attempt:
                report(attempt, loss)
    weights = checksum(list(model.parameters()))
    print(f"weights {weights}", flush=True)
    return weights


def main() -> None:
    asked = arguments(__doc__).parse_args()
    with ft.Session(shards=SHARDS) as session:
        train(session, **vars(asked))


if __name__ == "__main__":
    main()
