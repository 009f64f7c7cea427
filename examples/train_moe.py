"""A mixture of experts that trains on when a rank dies: in the same epoch, and no step is lost.

    python examples/train_moe.py [shm|gloo|ucx|mpi]

Three processes hold two experts each, and each has its own part of the batch. Amid step 20 rank 1 kills itself, between
dispatch and combine. The others finish and commit that step without its experts, and train on at once with the four
that are left.
"""

import os
import signal
import sys

import torch
from torch.nn import functional

from holdfast import ft
from holdfast.comms.experts import Switch
from holdfast.harness import LocalCluster

EXPERTS, TOP_K, FEATURES, TOKENS = 6, 2, 16, 64
KILLED, KILL_STEP = 1, 20


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The points of a rank in a step, and a function of them that has a kink in each coordinate."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    points = torch.randn(TOKENS, FEATURES, generator=generator)
    return points, points.abs() - 0.5 * points.roll(1, dims=1)


def train(session: ft.Session, steps: int) -> list[tuple[int, float, int]]:
    """Train; return each committed step, its loss on this rank, and how many ranks were alive after it."""
    router = torch.nn.Linear(FEATURES, EXPERTS)
    torch.nn.init.zeros_(router.weight)  # the same on all ranks
    torch.nn.init.zeros_(router.bias)
    experts = torch.nn.ModuleList()
    switch: Switch | None = None
    history = []
    for attempt in session.steps(steps):
        with attempt:
            if switch is None:
                sizes = {"top_k": TOP_K, "hidden": FEATURES, "max_tokens": TOKENS}
                switch = Switch(attempt.lasting, EXPERTS, **sizes, renormalise=True)
                torch.manual_seed(attempt.rank)
                for _ in switch.local_experts:
                    layers = torch.nn.Linear(FEATURES, 64), torch.nn.ReLU(), torch.nn.Linear(64, FEATURES)
                    experts.append(torch.nn.Sequential(*layers))
                optimizer = torch.optim.Adam([*router.parameters(), *experts.parameters()], lr=0.01)
            points, targets = batch(attempt.rank, attempt.step)
            scores = router(points) + 0.1 * torch.randn(TOKENS, EXPERTS)
            scores = scores.masked_fill(~torch.tensor(switch.reachable), float("-inf"))  # choose among the living
            weights, chosen = functional.softmax(scores, dim=1).topk(TOP_K)

            received = switch.dispatch(points, chosen, weights)
            outputs = torch.cat([expert(rows) for expert, rows in zip(experts, received.split(), strict=True)])
            if (attempt.rank, attempt.step) == (KILLED, KILL_STEP):
                os.kill(os.getpid(), signal.SIGKILL)
            predicted = switch.combine(outputs)

            loss = functional.mse_loss(predicted, targets)
            optimizer.zero_grad()
            loss.backward()
            for parameter in router.parameters():  # the experts' own gradients are complete: all tokens came to them
                switch.all_reduce(parameter.grad).div_(sum(switch.alive))
        if attempt.committed:  # by all, or by all that are left
            optimizer.step()
            history.append((attempt.step, float(loss.detach()), sum(switch.alive)))
    return history


def main() -> None:
    backend = sys.argv[1] if sys.argv[1:] else "shm"
    with LocalCluster(3, backend, session={"on_death": "go_on"}) as cluster:
        for history in cluster.start(train, 60).results(timeout=120.0):
            alive = [ranks for _, _, ranks in history]
            print(
                f"{len(history)} steps, {sum(ranks < 3 for ranks in alive)} of them without rank {KILLED}; "
                f"loss {history[0][1]:.3f} -> {history[-1][1]:.3f}"
            )


if __name__ == "__main__":
    main()
