"""Training that survives the death of ranks: a job of `holdfast run`.

    holdfast run -n 3 --spares 1 examples/train.py --steps 200

Then kill any of the processes it names (`kill -9 PID`): the step that was under way is done again by the others, or
by the spare in its place, and the loss at the end is the same to the last bit as without the kill.
"""

import argparse
import os

import torch

from holdfast import ft
from holdfast.comms.reproducible import sum_contributions

SHARDS = 12
"""Parts of the global batch: fixed, so that what is computed does not depend on how many ranks there are."""


def shard(step: int, number: int, truth: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (32, 8) and targets (32, 1) of one shard of one step: the same wherever it is made."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    inputs = torch.randn(32, 8, generator=generator)
    return inputs, inputs @ truth + 0.1 * torch.randn(32, 1, generator=generator)


def gradient(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of one shard, and its gradient, as one flat tensor."""
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([loss.detach().view(1), *(part.flatten() for part in gradients)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    truth = torch.randn(8, 1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    with ft.Session(shards=SHARDS) as session:
        session.attach("model", model)
        session.attach("optimizer", optimizer)
        for attempt in session.steps(steps):
            with attempt:
                parts = [gradient(model, *shard(attempt.step, number, truth)) for number in attempt.shards]
                total = torch.empty(1 + sum(p.numel() for p in model.parameters()))
                sum_contributions(attempt.comm, parts, total)
            if attempt.committed:
                loss, mean = total[0] / attempt.total_shards, total[1:] / attempt.total_shards
                for parameter, part in zip(model.parameters(), mean.split([8, 1]), strict=True):
                    parameter.grad = part.view_as(parameter)
                optimizer.step()
                if attempt.step % 20 == 0 or attempt.step == steps - 1:
                    where = f"rank {session.rank} of {session.size}, pid {os.getpid()}"
                    print(f"step {attempt.step}: loss {loss:.9f} ({where})")


if __name__ == "__main__":
    main()
