"""The models and cases of the parity matrix: small, each with one feature that wrappers often mishandle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

FEATURES, TARGETS = 6, 4
BRANCHES = ("a", "b", "c")


@dataclass(frozen=True)
class Batch:
    """Samples, and the model branches they use."""

    x: torch.Tensor
    y: torch.Tensor
    used: tuple[str, ...] = ()

    def to(self, device: torch.device) -> Batch:
        return Batch(self.x.to(device), self.y.to(device), self.used)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the matrix. Whatever depends on (step, rank, micro, world_size) is a function of these four.

    `zero`: before each step, gradients are set `to none` or `to zeros`, `never` touched, `replaced` by a copy, or only
    `some` set to None. `quiet`: no_sync covers the `whole` micro-batch, or only its `backward`. `by_shard`: the
    reference processes the shards one by one, because samples of one batch interact or take different branches. `amp`:
    forward runs in autocast, and a GradScaler scales the loss.
    """

    build: Callable[[], nn.Module]
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = lambda params: torch.optim.SGD(params, 0.1)
    steps: int = 3  # the first has no plan yet; the second is the first with overlap
    micro: int = 1
    quiet: str = "whole"
    zero: str = "to none"
    size: Callable[[int, int, int, int], int] = lambda step, rank, micro, world_size: 3
    used: Callable[[int, int, int, int], tuple[str, ...]] = lambda step, rank, micro, world_size: ()
    by_shard: bool = False
    amp: bool = False
    shape: tuple[int, ...] = (FEATURES,)
    memory_format: Callable[[int], torch.memory_format] = lambda rank: torch.contiguous_format

    def batches(self, step: int, rank: int, world_size: int) -> list[Batch]:
        """The micro-batches of one rank in one step; deterministic."""
        found = []
        for micro in range(self.micro):
            place = (step, rank, micro, world_size)
            draw = torch.Generator().manual_seed(1 + micro + 100 * rank + 10_000 * step)
            x = torch.randn(self.size(*place), *self.shape, generator=draw)
            y = torch.randn(self.size(*place), TARGETS, generator=draw)
            found.append(Batch(x.contiguous(memory_format=self.memory_format(rank)), y, self.used(*place)))
        return found


def measure_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean over samples; zero on a rank without samples."""
    out = model(batch.x, batch.used) if batch.used else model(batch.x)
    return (out - batch.y).square().sum() / max(1, batch.y.numel())


class Plain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, TARGETS))


class Tied(nn.Module):
    """Input and output share a matrix under two names, and one layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.words = nn.Embedding(FEATURES, 8)
        self.head = nn.Linear(8, FEATURES)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(self.words(x.argmax(1))))
        return self.head(torch.tanh(self.inner(hidden)))[:, :TARGETS]


def build_frozen() -> nn.Module:
    model = Plain()
    model[2].requires_grad_(False)
    model[0].bias.requires_grad_(False)
    return model


class Branch(nn.Module):
    """A model with a parameter that is transposed in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.Parameter(torch.randn(8, 4).t())
        self.way = nn.Linear(4, TARGETS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.way(torch.tanh(x @ self.mixer.t()))


class Branches(nn.Module):
    """A model with branches that only some samples use."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, 8)
        self.branches = nn.ModuleDict({name: Branch() for name in BRANCHES})
        self.head = nn.Linear(8, TARGETS)

    def forward(self, x: torch.Tensor, used: tuple[str, ...] = ()) -> torch.Tensor:
        hidden = torch.tanh(self.stem(x))
        return sum((self.branches[name](hidden) for name in used), start=self.head(hidden))


def use_here_and_there(step: int, rank: int, micro: int, world_size: int) -> tuple[str, ...]:
    """`a` on one rank, a different one at each step; `b` on all others; `c` on none, then all, then rank 0, then
    none."""
    odd_one = rank == step % world_size
    third = step == 1 or (step == 2 and rank == 0)
    return ("a" if odd_one else "b", *(["c"] if third else []))


def use_in_turn(step: int, rank: int, micro: int, world_size: int) -> tuple[str, ...]:
    """One branch per micro-batch: after three, every branch has a gradient."""
    return (BRANCHES[(step + rank + micro) % 3],)


def use_a_few(step: int, rank: int, micro: int, world_size: int) -> tuple[str, ...]:
    """Across the micro-batches of a step: `a` on rank 0 in the first, `b` on every rank in the second, `c` at the
    end."""
    return (("a",) if rank == 0 else ("b",), ("b",), ("c",) if step % 2 and rank else ("b",))[micro]


class AddAliased(torch.autograd.Function):
    """Adds two inputs and returns the same memory as the gradient of both."""

    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left + right

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, grad.view_as(grad)


class Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.inner, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, TARGETS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(x) + AddAliased.apply(self.left, self.right)))


class TwoTypes(nn.Module):
    """Two independent towers: rounding in one does not affect the other."""

    def __init__(self, second: torch.dtype) -> None:
        super().__init__()
        self.first_in, self.second_in = nn.Linear(FEATURES, 8), nn.Linear(FEATURES, 8).to(second)
        self.first_out, self.second_out = nn.Linear(8, TARGETS), nn.Linear(8, TARGETS).to(second)
        self.second = second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = TARGETS // 2
        first = self.first_out(torch.tanh(self.first_in(x)))[:, :half]
        second = self.second_out(torch.tanh(self.second_in(x.to(self.second))))[:, half:]
        wide = torch.promote_types(torch.float32, self.second)
        return torch.cat([first.to(wide), second.to(wide)], 1)


class LowPrecision(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, TARGETS))
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(torch.bfloat16)).float()


class Normed(nn.Module):
    """Two BatchNorms, one with a moving and one with a cumulative average; and a side branch of any dtype."""

    def __init__(self, norms: torch.dtype = torch.float32, side: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.side = nn.Linear(FEATURES, TARGETS, dtype=side)
        self.stem = nn.Linear(FEATURES, 8, dtype=norms)
        self.moving = nn.BatchNorm1d(8, momentum=0.3, dtype=norms)
        self.overall = nn.BatchNorm1d(8, momentum=None, dtype=norms)
        self.head = nn.Linear(8, TARGETS, dtype=norms)
        self.wide = torch.promote_types(torch.float32, torch.promote_types(norms, side))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.moving(self.stem(x.to(self.stem.weight.dtype))))
        out, side = self.head(self.overall(hidden)), self.side(x.to(self.side.weight.dtype))
        half = TARGETS // 2
        return torch.cat([out[:, :half].to(self.wide), side[:, half:].to(self.wide)], 1)


class NormedTwice(nn.Module):
    """Independent BatchNorms of two dtypes, the less precise one first."""

    def __init__(self) -> None:
        super().__init__()
        dtypes, half = (torch.float32, torch.float64), TARGETS // 2
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, half)).to(dtype)
            for dtype in dtypes
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([tower(x.to(tower[0].weight.dtype)).double() for tower in self.towers], 1)


class Images(nn.Module):
    """Convolutions in channels_last: plain, depthwise and 1 x 1 (with ambiguous strides)."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 5, 1)]
        self.body = nn.Sequential(*convolutions).to(memory_format=torch.channels_last)
        self.head = nn.Linear(5, TARGETS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Checkpointed(nn.Module):
    """A model that recomputes its middle part in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.stem, self.head, self.use_reentrant = nn.Linear(FEATURES, 8), nn.Linear(8, TARGETS), use_reentrant
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.stem(x))
        return self.head(checkpoint(self.middle, hidden, use_reentrant=self.use_reentrant))


class Complex(nn.Module):
    """Complex weights, with or without real ones."""

    def __init__(self, dtype: torch.dtype, with_real: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn((), dtype=dtype))
        self.matrix = nn.Parameter(torch.randn(FEATURES, TARGETS, dtype=dtype) / 2)
        self.bias = nn.Parameter(torch.randn(TARGETS, dtype=dtype))
        real = self.bias.real.dtype
        self.last = nn.Linear(TARGETS, TARGETS, dtype=real) if with_real else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = (x.to(self.matrix.dtype) @ self.matrix + self.bias) * self.scale
        return self.last(torch.tanh(out.real + out.imag))


class Odd(nn.Module):
    """Scalar and empty parameters at both ends and in between; one is part of a larger one."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0))
        self.scale = nn.Parameter(torch.randn(()))
        self.inner = nn.Linear(FEATURES, 8)
        self.hollow = nn.Parameter(torch.empty(3, 0, 2))
        self.shift = nn.Parameter(torch.randn(()))
        self.window = nn.Parameter(torch.randn(8, 9)[:, 1 : 1 + TARGETS])
        self.void = nn.Parameter(torch.empty(0, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nothing = self.nothing.sum() + self.hollow.sum() + self.void.sum()
        return torch.tanh(self.inner(x)) @ self.window * self.scale + self.shift + nothing


def build_momentum(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True)


def build_adam(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # A large eps: the default turns the rounding error of a gradient near zero into a full Adam step.
    return torch.optim.Adam(params, 0.01, eps=1e-3)


def size_by_rank(step: int, rank: int, micro: int, world_size: int) -> int:
    """Uneven batches. The third is so uneven that the last rank has no samples."""
    return 0 if step == 2 and rank == world_size - 1 else 2 + rank + step % 2


def size_for_norms(step: int, rank: int, micro: int, world_size: int) -> int:
    """Enough samples to keep the variance away from zero: otherwise rounding errors would be amplified."""
    return 8


def size_for_norms_by_rank(step: int, rank: int, micro: int, world_size: int) -> int:
    return 8 + 2 * rank + step


def mix_formats(rank: int) -> torch.memory_format:
    return torch.channels_last if rank == 0 else torch.contiguous_format


UNUSED = {"find_unused_parameters": True}
BY_SAMPLES = {"average": "samples"}

CASES = {
    "plain": Case(build=Plain),
    "momentum": Case(build=Plain, optimizer=build_momentum, steps=4),
    "adam": Case(build=Plain, optimizer=build_adam, steps=4),
    "gradients zeroed in place": Case(build=Plain, zero="to zeros"),
    "gradients never zeroed": Case(build=Plain, zero="never"),
    "gradients replaced by copies": Case(build=Plain, zero="replaced"),
    "some gradients set to none": Case(build=Plain, zero="some"),
    "tied": Case(build=Tied),
    "aliased gradients": Case(build=Aliased),
    "frozen": Case(build=build_frozen, optimizer=build_momentum),
    "unused": Case(
        build=Branches, options=UNUSED, used=use_here_and_there, steps=4, by_shard=True, optimizer=build_momentum
    ),
    "unused, zeroed in place": Case(
        build=Branches, options=UNUSED, used=use_here_and_there, steps=4, by_shard=True, zero="to zeros"
    ),
    "unused, never zeroed": Case(
        build=Branches, options=UNUSED, used=use_here_and_there, steps=4, by_shard=True, zero="never"
    ),
    "float32 and float64": Case(build=lambda: TwoTypes(torch.float64)),
    "float32 and bfloat16": Case(build=lambda: TwoTypes(torch.bfloat16)),
    "bfloat16": Case(build=LowPrecision),
    "batchnorm": Case(build=Normed, by_shard=True, size=size_for_norms, optimizer=build_momentum),
    "batchnorm with bfloat16": Case(build=lambda: Normed(side=torch.bfloat16), by_shard=True, size=size_for_norms),
    "batchnorm in float64": Case(
        build=lambda: Normed(torch.float64, torch.float64), by_shard=True, size=size_for_norms
    ),
    "batchnorm in float64 with float32": Case(build=lambda: Normed(torch.float64), by_shard=True, size=size_for_norms),
    "batchnorm in float32 and in float64": Case(build=NormedTwice, by_shard=True, size=size_for_norms),
    "batchnorm, accumulation": Case(build=Normed, by_shard=True, size=size_for_norms, micro=3),
    "batchnorm, uneven": Case(build=Normed, by_shard=True, options=BY_SAMPLES, size=size_for_norms_by_rank),
    "accumulation": Case(build=Plain, micro=3),
    "accumulation, no_sync around backward alone": Case(build=Plain, micro=3, quiet="backward"),
    "accumulation, zeroed in place": Case(build=Plain, micro=3, zero="to zeros", optimizer=build_adam),
    "accumulation, other parameters in turn": Case(build=Branches, micro=3, used=use_in_turn, by_shard=True),
    "accumulation, other parameters in turn, no_sync around backward alone": Case(
        build=Branches, micro=3, quiet="backward", used=use_in_turn, by_shard=True, zero="to zeros"
    ),
    "accumulation, unused": Case(build=Branches, micro=3, options=UNUSED, used=use_a_few, by_shard=True),
    "uneven": Case(build=Plain, options=BY_SAMPLES, size=size_by_rank, steps=4, optimizer=build_momentum),
    "uneven, never zeroed": Case(build=Plain, options=BY_SAMPLES, size=size_by_rank, steps=4, zero="never"),
    "uneven, accumulation": Case(build=Plain, options=BY_SAMPLES, size=size_by_rank, steps=4, micro=3),
    "uneven, unused": Case(
        build=Branches, options=BY_SAMPLES | UNUSED, size=size_by_rank, steps=4, used=use_here_and_there, by_shard=True
    ),
    "channels_last": Case(build=Images, shape=(3, 6, 6), memory_format=mix_formats),
    "channels_last, gradients replaced by copies": Case(
        build=Images, shape=(3, 6, 6), memory_format=mix_formats, zero="replaced"
    ),
    "complex64 and float32": Case(build=lambda: Complex(torch.complex64, True)),
    "complex64": Case(build=lambda: Complex(torch.complex64, False)),
    "complex128 and float64": Case(build=lambda: Complex(torch.complex128, True), zero="to zeros"),
    "0-dim and empty": Case(build=Odd, optimizer=build_momentum),
    "0-dim and empty, zeroed in place": Case(build=Odd, zero="to zeros"),
    "autocast and GradScaler": Case(build=Plain, amp=True, by_shard=True, steps=4),
    "autocast and GradScaler, accumulation": Case(build=Plain, amp=True, by_shard=True, micro=3),
    "checkpointing": Case(build=lambda: Checkpointed(False)),
    "checkpointing, reentrant": Case(build=lambda: Checkpointed(True)),
}
