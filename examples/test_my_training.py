"""Chaos-test your own training: `pytest examples/test_my_training.py`. The fixture `chaos` comes with holdfast."""

import torch

from holdfast.comms.reproducible import sum_contributions


def train(session, steps):
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    session.attach("model", model)
    for attempt in session.steps(steps):
        with attempt:
            gradients = [torch.sin(model.weight.data * (shard + attempt.step)) for shard in attempt.shards]
            total = torch.empty_like(model.weight.data)
            sum_contributions(attempt.comm, gradients, total)
        if attempt.committed:
            model.weight.data -= 0.01 * total
    return model.weight.data


def test_a_kill_changes_nothing(chaos):
    run = chaos.run(train, 60, ranks=3, spares=1, faults=[chaos.kill(1, step=20)])
    run.check()  # invariants held, and the weights have the bits of a run without faults
