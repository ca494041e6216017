"""Profile, predict and tune your own model, with two inputs, a custom loss and two optimizers.

python examples/own_model.py                              # starts two local ranks
torchrun --nproc-per-node 2 examples/own_model.py         # the same, in a launched world
"""

import torch
from torch import nn

import paceline


class Matcher(nn.Module):
    """Scores how well two vectors match."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(64, 256), nn.Linear(32, 256)
        self.score = nn.Sequential(nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, left, right):
        return self.score(self.left(left) * self.right(right)).squeeze(1)


def build():
    """Return a model and a step function, here with two inputs, a custom loss and two optimizers."""
    model = Matcher()
    optimizers = [torch.optim.SGD(model.score.parameters(), lr=0.01), torch.optim.Adam(model.left.parameters())]
    left, right, target = torch.randn(16, 64), torch.randn(16, 32), torch.rand(16)

    def step(model):
        loss = (model(left, right=right) - target).abs().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return model, step


def main():
    if paceline.is_launched():  # every rank calls this and gets the same results
        model, step = build()
        profile = paceline.profile(model, step, iters=5)
        tuned = paceline.tune(model, step, quick=True, iters=3)
    else:  # Paceline calls the factory on local ranks
        profile = paceline.profile(build, ranks=2, iters=5)
        tuned = paceline.tune(build, ranks=2, quick=True, iters=3)
        model, step = build()
    predicted = paceline.predict(profile, network="10gbe", ranks=64)
    low_s, high_s = predicted.interval
    lines = [
        f"profile: {profile.answer}",
        f"predicted on 64 ranks: {predicted.step_s * 1e3:.1f} ms ({low_s * 1e3:.1f} to {high_s * 1e3:.1f})",
        f"tuned: {tuned.verdict}, {len(tuned.plan.buckets)} bucket(s)",
    ]
    if paceline.is_launched():
        with paceline.init(announce=None) as world:
            step(paceline.DDP(model, plan=tuned.plan))
            if world.rank > 0:
                return
    print("\n".join(lines))


if __name__ == "__main__":
    main()
