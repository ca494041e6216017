"""One step: micro-batches equal one large batch; phase times; a user's own step; kernels."""

import contextlib
import copy
import itertools
import math
import time

import pytest
import torch
import torch._dynamo  # optimizers import it, and importing it sets an environment variable; do that before any test
import torch.nn.functional as F
from torch import nn

from paceline.training import step
from paceline.training.loader import LoadedBatch
from paceline.training.step import (
    Learner,
    NoPhases,
    PhaseClock,
    PhaseTimes,
    find_bad_parameter,
    fixed_kernels,
    mark_phases,
    take_step,
)
from paceline.workloads.data import Batch, DataForm
from paceline.workloads.data.sharding import split_window

CLASSES = DataForm(kind="images", shape=(6,), num_classes=5)
NUMBERS = DataForm(kind="numbers", shape=(6,), num_classes=0)
TOKENS = DataForm(kind="tokens", shape=(3,), num_classes=5, vocabulary=5)
SIZE = 11


class Watched(nn.Module):
    """A wrapper that only records the contexts of each forward and backward."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.is_quiet = False
        self.seen = []

    @contextlib.contextmanager
    def no_sync(self):
        self.is_quiet = True
        yield
        self.is_quiet = False

    def forward(self, *args):
        self.seen.append(("forward", self.is_quiet))
        output = self.module(*args)
        output.register_hook(lambda _: self.seen.append(("backward", self.is_quiet)))
        return output


class Notes:
    def __init__(self):
        self.phases = []

    def enter(self, phase):
        self.phases.append(phase)


def build_module(form):
    torch.manual_seed(3)
    if form.kind == "tokens":
        return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)).double()
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, form.num_classes or 1)).double()


def draw(form):
    generator = torch.Generator().manual_seed(4)
    if form.kind == "tokens":
        ids = torch.randint(5, (SIZE, 4), generator=generator)
        return Batch(ids[:, :-1], ids[:, 1:])
    inputs = torch.randn(SIZE, 6, generator=generator, dtype=torch.float64)
    if form.num_classes == 0:
        return Batch(inputs, torch.randn(SIZE, 1, generator=generator))
    return Batch(inputs, torch.randint(5, (SIZE,), generator=generator))


def build_learner(module, form, **changes):
    fields = {
        "model": module, "module": module, "optimizer": torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.5),
        "scaler": torch.amp.GradScaler("cpu", enabled=False), "form": form, "device": torch.device("cpu"),
        "world_size": 1, "precision": "fp32", "clip": None,
    }  # fmt: skip
    return Learner(**{**fields, **changes})


def cut(batch, size, rank=0, world_size=1):
    return [
        LoadedBatch(Batch(batch.inputs[micro.indices], batch.targets[micro.indices]), micro.num_counted)
        for micro in split_window(torch.arange(len(batch)), rank, world_size, size)
    ]


def plain_loss(module, batch, form):
    """The loss as a mean over all targets, by the textbook definition."""
    answers = module(batch.inputs)
    if form.num_classes == 0:
        return F.mse_loss(answers, batch.targets.double())
    return F.cross_entropy(answers.flatten(0, -2), batch.targets.flatten())


@pytest.mark.parametrize("form", [CLASSES, NUMBERS, TOKENS], ids=lambda form: form.kind)
@pytest.mark.parametrize("size", range(1, SIZE + 1))
def test_micro_batches_add_up_to_one_big_batch(form, size):
    """No size from 2 to 10 divides 11 samples equally, so an average of averages would be noticed."""
    module, batch = build_module(form), draw(form)
    reference = copy.deepcopy(module)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.5)
    learner = build_learner(module, form)
    for _ in range(2):
        optimizer.zero_grad()
        wanted = plain_loss(reference, batch, form)
        wanted.backward()
        optimizer.step()
        num_targets = SIZE * form.targets_per_sample
        outcome = take_step(learner, cut(batch, size), num_targets, 0.1, NoPhases())
        assert outcome.loss_sum.item() / num_targets == pytest.approx(wanted.item(), rel=1e-6)
    for param, want in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("world_size", [2, 3, 12])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_average_over_ranks_is_the_gradient_of_the_whole(world_size, size):
    """With 12 ranks, there are fewer samples than ranks; a rank without one still takes its step, with zero weight."""
    batch = draw(CLASSES)
    reference = build_module(CLASSES)
    plain_loss(reference, batch, CLASSES).backward()
    total, loss, correct = [torch.zeros_like(p) for p in reference.parameters()], 0.0, 0
    for rank in range(world_size):
        module = build_module(CLASSES)
        start = [p.detach().clone() for p in module.parameters()]
        learner = build_learner(module, CLASSES, world_size=world_size)
        outcome = take_step(learner, cut(batch, size, rank, world_size), SIZE, 1.0, NoPhases())
        assert outcome.num_correct is not None
        loss, correct = loss + outcome.loss_sum.item(), correct + outcome.num_correct.item()
        for sum_, before, after in zip(total, start, module.parameters(), strict=True):
            sum_ += (before - after.detach()) / world_size
    for sum_, param in zip(total, reference.parameters(), strict=True):
        torch.testing.assert_close(sum_, param.grad, rtol=1e-6, atol=1e-7)
    answers = reference(batch.inputs)
    assert loss / SIZE == pytest.approx(F.cross_entropy(answers, batch.targets).item(), rel=1e-6)
    assert correct == (answers.argmax(-1) == batch.targets).sum().item()


@pytest.mark.parametrize(("size", "count"), [(11, 1), (6, 2), (3, 4), (1, 11)])
def test_only_the_last_micro_batch_is_synchronized(size, count):
    """Forward runs in the same context, because torch decides there whether backward will send."""
    wrapper = Watched(build_module(CLASSES))
    learner = build_learner(wrapper.module, CLASSES, model=wrapper)
    phases = Notes()
    take_step(learner, cut(draw(CLASSES), size), SIZE, 0.1, phases)
    pairs = [(kind, number < count - 1) for number in range(count) for kind in ("forward", "backward")]
    assert wrapper.seen == pairs
    assert phases.phases == ["forward", "backward"] * count + ["optimizer"]


def test_gradients_are_cleared_after_a_step():
    learner = build_learner(build_module(CLASSES), CLASSES)
    take_step(learner, cut(draw(CLASSES), 4), SIZE, 0.1, NoPhases())
    assert all(param.grad is None for param in learner.module.parameters())


@pytest.mark.parametrize(("clip", "is_cut"), [(1e-3, True), (1e3, False)])
@pytest.mark.parametrize("has_scaler", [False, True])
def test_clipping_bounds_the_norm_of_what_is_applied(clip, is_cut, has_scaler):
    """A scaled loss must be unscaled before the norm is computed."""
    module = build_module(CLASSES)
    before = [param.detach().clone() for param in module.parameters()]
    reference = copy.deepcopy(module)
    plain_loss(reference, draw(CLASSES), CLASSES).backward()
    norm = math.sqrt(sum(param.grad.square().sum().item() for param in reference.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=has_scaler)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    learner = build_learner(module, CLASSES, clip=clip, scaler=scaler, optimizer=optimizer)
    take_step(learner, cut(draw(CLASSES), 4), SIZE, 0.5, NoPhases())
    way = [(old - new.detach()) / 0.5 for old, new in zip(before, module.parameters(), strict=True)]
    moved = math.sqrt(sum(part.square().sum().item() for part in way))
    assert moved == pytest.approx(min(norm, clip), rel=1e-3)
    assert (norm > clip) is is_cut


def test_the_rate_reaches_every_group():
    module = build_module(CLASSES)
    groups = [{"params": [param]} for param in module.parameters()]
    learner = build_learner(module, CLASSES, optimizer=torch.optim.SGD(groups, lr=1.0))
    take_step(learner, cut(draw(CLASSES), 4), SIZE, 0.125, NoPhases())
    assert [group["lr"] for group in learner.optimizer.param_groups] == [0.125] * 4


def test_a_step_with_an_infinite_scaled_gradient_is_skipped():
    """An occasional fp16 overflow: the parameters stay, and the scale decreases."""
    module = nn.Linear(6, 5)
    nn.init.zeros_(module.weight)
    before = [param.detach().clone() for param in module.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    batch = draw(CLASSES)
    batch = Batch(batch.inputs.float() * 1e10, batch.targets)
    outcome = take_step(build_learner(module, CLASSES, scaler=scaler), cut(batch, 4), SIZE, 0.1, NoPhases())
    assert math.isfinite(outcome.loss_sum.item())
    assert all(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))
    assert scaler.get_scale() == 2.0**119


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", None)])
def test_products_are_in_the_requested_precision(precision, dtype):
    seen = []
    module = build_module(CLASSES).float()
    module[2].register_forward_hook(lambda layer, args, output: seen.append(output.dtype))
    batch = draw(CLASSES)
    learner = build_learner(module, CLASSES, precision=precision)
    outcome = take_step(learner, cut(Batch(batch.inputs.float(), batch.targets), 11), SIZE, 0.1, NoPhases())
    assert seen == [dtype or torch.float32]
    assert outcome.loss_sum.dtype == torch.float32


@pytest.mark.parametrize(
    ("spoil", "wanted"),
    [
        (lambda m: None, ""),
        (lambda m: m[2].weight.data.fill_(math.inf), "2.weight"),
        (lambda m: m.register_buffer("phase", torch.tensor([1j, math.nan])), "phase"),
        (lambda m: setattr(m[0].bias, "grad", torch.full((4,), math.nan).double()), "the gradient of 0.bias"),
    ],
)
def test_the_first_bad_parameter_is_named(spoil, wanted):
    module = build_module(CLASSES)
    spoil(module)
    assert find_bad_parameter(module) == wanted


def test_a_nan_loss_names_a_parameter():
    batch = draw(CLASSES)
    batch.inputs[7, 2] = math.nan
    outcome = take_step(build_learner(build_module(CLASSES), CLASSES), cut(batch, 4), SIZE, 0.1, NoPhases())
    assert math.isnan(outcome.loss_sum.item())
    assert outcome.bad_parameter == "the gradient of 0.weight"


def test_repeated_phases_are_summed(monkeypatch):
    moments = iter([0.0, 1.0, 3.0, 3.5, 7.5, 8.0])
    monkeypatch.setattr(step, "mark", lambda _: next(moments))
    clock = PhaseClock(torch.device("cpu"))
    for phase in ("forward", "backward", "forward", "backward", "optimizer"):
        clock.enter(phase)
    assert clock.end().read() == pytest.approx({"forward": 1.5, "backward": 6.0, "optimizer": 0.5})


def test_every_step_starts_from_zero(monkeypatch):
    moments = iter([0.0, 1.0, 10.0, 12.0])
    monkeypatch.setattr(step, "mark", lambda _: next(moments))
    clock = PhaseClock(torch.device("cpu"))
    clock.enter("forward")
    assert clock.end().read() == {"forward": 1.0}
    clock.enter("backward")
    assert clock.end().read() == {"backward": 2.0}


def test_gpu_events_are_read_in_milliseconds():
    class Event:
        def __init__(self, moment_ms):
            self.moment_ms = moment_ms

        def elapsed_time(self, end):
            return end.moment_ms - self.moment_ms

    times = PhaseTimes([("forward", Event(1.0)), ("backward", Event(4.0)), ("end", Event(4.5))])
    assert times.read() == pytest.approx({"forward": 3e-3, "backward": 5e-4})


def test_nothing_is_timed_unless_requested():
    quiet = NoPhases()
    quiet.enter("forward")
    assert quiet.end().read() == {}


class Phases:
    """Records the phases of a step."""

    def __init__(self):
        self.entered = []

    def enter(self, phase):
        self.entered.append(phase)

    def end(self):
        return PhaseTimes()


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(4, 2)

    def forward(self, x, *, y):
        return {"sum": self.left(x) + self.right(y)}


def build_own(num_micro_batches=1, num_optimizers=1):
    """A step of a user's module with two inputs, its own loss and its own update."""
    torch.manual_seed(0)
    module = TwoInputs()
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for _ in range(num_optimizers)]

    def step(model):
        for _ in range(num_micro_batches):
            output = model(torch.ones(5, 3), y=torch.ones(5, 4))
            loss = output["sum"].square().mean()
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return module, step


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_a_users_own_step_has_the_phases_of_ours(num_micro_batches):
    (module, step), phases = build_own(num_micro_batches, num_optimizers=2), Phases()
    with mark_phases(module, phases):
        step(module)
    # Each optimizer's step enters its phase once more, and the times add up.
    entered = [phase for phase, _ in itertools.groupby(phases.entered)]
    assert entered == ["data_wait", *["forward", "backward", "optimizer"] * num_micro_batches]


def test_marking_the_users_own_step_leaves_nothing_behind():
    (module, step), backward = build_own(), torch.autograd.backward
    losses = []
    for _ in range(3):
        with mark_phases(module, Phases()):
            losses.append(step(module))
    assert losses[0] > losses[1] > losses[2]
    assert torch.autograd.backward is backward and not module._forward_pre_hooks
    with pytest.raises(KeyError, match="the user's"), mark_phases(module, Phases()):
        raise KeyError("the user's")
    assert torch.autograd.backward is backward and not module._forward_pre_hooks


def test_the_time_of_a_users_backward_is_in_its_phase():
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(0.05)
            return grad

    module = nn.Linear(2, 2)
    clock = PhaseClock(torch.device("cpu"))
    with mark_phases(module, clock):
        Slow.apply(module(torch.ones(1, 2))).sum().backward()
    seconds = clock.end().read()
    assert seconds["backward"] > 0.05 > seconds["forward"]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_kernels_that_torch_would_turn_off_are_off_from_the_start_and_restored(precision):
    before = torch._C._get_mkldnn_enabled()
    with fixed_kernels(torch.device("cpu"), precision):
        inside = torch._C._get_mkldnn_enabled()
        with torch.autocast("cpu", torch.float16 if precision == "fp16" else torch.bfloat16, precision != "fp32"):
            for _ in range(2):
                torch.nn.functional.linear(torch.ones(8, 16), torch.ones(16, 16), torch.ones(16))
        assert torch._C._get_mkldnn_enabled() == inside, "torch changed its mind in the middle"
    assert torch._C._get_mkldnn_enabled() == before
