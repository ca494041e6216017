"""Profiles of small modules on CPU: the order of gradients, the times of blocks, and no side effects."""

import contextlib
import gc
import time
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo  # checkpointing imports it, which sets an environment variable
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.errors import ConfigError, MeasurementError
from paceline.measure import engine, job_profile
from paceline.measure.job_profile import LayerClock, measure_layers
from paceline.measure.step_bench import OwnJob, Replica, mark_phases
from paceline.records.exchange import export_layer_sizes, export_layer_times, load_layer_sizes, load_layer_times
from paceline.runtime.ranks.moments import mark


class Sleep(torch.autograd.Function):
    """Takes a known time in forward and in backward."""

    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.backward_s)
        return grad, None, None


class Slow(nn.Linear):
    """A linear layer that sleeps long enough to stand out from the noise."""

    def __init__(self, forward_s=0.0, backward_s=0.0):
        super().__init__(4, 4)
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x):
        return Sleep.apply(super().forward(x), self.forward_s, self.backward_s)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.body(self.embed(x)))


WORLD = SimpleNamespace(rank=0, world_size=1, shares_clock=False, share=lambda value: [value])


@pytest.fixture(autouse=True)
def _meets_nobody(monkeypatch):
    monkeypatch.setattr(dist, "new_group", lambda *args, **options: None)
    monkeypatch.setattr(dist, "barrier", lambda group: None)
    monkeypatch.setattr(engine, "agree_on_max", lambda value, control: value)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # takes longer than the rest of a test


LABELS = {"model": "toy", "precision": "fp32", "batch_size": 2}


def build_replica(module, compute_loss):
    """A replica with a step of forward, backward, and clearing its gradients."""

    def run(given, phases):
        phases.enter("forward")
        loss = compute_loss()
        phases.enter("backward")
        loss.backward()
        phases.enter("optimizer")
        module.zero_grad()

    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    return Replica(module, module, device, run)


def profile(module, x=None, blocks=None, *, loss=None, iters=3, warmup=1):
    x = torch.randn(2, 4) if x is None else x
    replica = build_replica(module, lambda: (loss or module)(x).sum())
    return measure_layers(WORLD, replica, LABELS, blocks, iters, warmup)[0]


def names(record):
    return [parameter.name for parameter in record.parameters]


def block(record, name):
    return next(times for times in (*record.blocks, record.outside) if times.name == name)


def test_gradients_of_a_chain_are_ready_from_its_end():
    record = profile(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4))))
    assert names(record) == ["3.weight", "2.weight", "1.weight", "0.weight"]
    assert record.is_order_stable
    assert [p.num_bytes for p in record.parameters] == [64] * 4 and not record.unused
    assert [len(p.ready_s) for p in record.parameters] == [3] * 4
    assert (record.timing.count, len(record.timing.warmup_seconds)) == (3, 1)
    assert (record.model, record.device, record.dtype, record.batch_size) == ("toy", "cpu", "fp32", 2)


def test_a_tied_parameter_is_ready_after_its_last_use_and_an_unused_one_never():
    record = profile(Tied(), torch.tensor([[1, 2], [3, 4]]))
    assert names(record)[2:] == ["embed.weight", "unused.bias", "unused.weight"]
    tied = record.parameters[2]
    assert (tied.aliases, tied.block, tied.num_bytes) == (("head.weight",), "embed", 80)
    assert [p.name for p in record.unused] == ["unused.bias", "unused.weight"]
    assert all(p.median_s <= tied.median_s for p in record.parameters if p.median_s is not None)
    assert record.ready_of("head") is None
    assert block(record, "unused").backward_s == (0.0,) * 3


def test_parameters_that_are_not_trained_are_left_out():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[0].requires_grad_(False)
    record = profile(module)
    assert set(names(record)) == {"1.weight", "1.bias"}
    assert record.note == "2 parameters are not trained"
    assert record.parameters_of("0") == ()


def test_a_gradient_is_noted_when_it_has_been_accumulated():
    module, x = nn.Sequential(nn.Linear(4, 4, bias=False)), torch.ones(2, 4)
    seen = []

    def spy(device):
        seen.append(module[0].weight.grad is not None)
        return mark(device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_profile, "mark", spy)
        profile(module, x, blocks=[], iters=1)
    # A profiled step has five events; the first and the middle one carry no gradient, and the hook's is the third.
    assert seen[:5] == [False, False, True, True, False]


def test_the_order_is_that_of_hooks_on_the_parameters():
    module, x = Tied(), torch.tensor([[1, 2], [3, 4]])
    copy, order = Tied(), []
    for name, param in copy.named_parameters():
        param.register_post_accumulate_grad_hook(lambda param, name=name: order.append(name))
    copy(x).sum().backward()
    assert names(profile(module, x))[:3] == order


def test_times_of_blocks_are_where_they_are_spent():
    module = nn.Sequential(Slow(0.004, 0.012), nn.ReLU(), Slow(0.008, 0.002))

    def loss(x):
        return Sleep.apply(module(x), 0.0, 0.006)  # outside all blocks, like a head that is a plain function

    record = profile(module, loss=loss)
    # Compare all modules at once: excess in one would be missing in another.
    for phase, slept in (
        ("forward_s", {"0": 0.004, "2": 0.008}),
        ("backward_s", {"0": 0.012, "2": 0.002, "outside": 0.006}),
    ):
        assert all(min(getattr(block(record, name), phase)) >= at_least for name, at_least in slept.items())
    assert record.ready_of("2") >= 0.008
    assert record.ready_of("0") >= 0.020


def test_time_between_blocks_belongs_to_no_block():
    first, last = nn.Linear(4, 4), Slow(0.0, 0.002)
    record = profile(
        nn.Sequential(first, last),
        blocks=[("first", first), ("last", last)],
        loss=lambda x: last(Sleep.apply(first(x), 0.003, 0.005)),
    )
    assert min(record.outside.forward_s) >= 0.003
    assert min(record.outside.backward_s) >= 0.005
    assert min(block(record, "last").backward_s) >= 0.002


def test_blocks_and_the_rest_add_up_to_the_whole():
    module = Tied()
    record = profile(module, torch.tensor([[1, 2]]))
    for phase, whole in (("forward_s", record.profiled_forward), ("backward_s", record.profiled_backward)):
        rows = [getattr(times, phase) for times in (*record.blocks, record.outside)]
        assert [sum(row) for row in zip(*rows, strict=True)] == pytest.approx(list(whole.reduced_s))
        assert all(value > 0 for value in getattr(block(record, "body"), phase))
    assert all(value > 0 for value in record.outside.backward_s)


def test_a_block_that_is_called_twice_has_the_time_of_both():
    slow = Slow(0.003, 0.003)
    record = profile(nn.Sequential(slow, nn.ReLU(), slow), blocks=[("slow", slow)])
    assert min(block(record, "slow").forward_s) >= 0.006
    assert min(block(record, "slow").backward_s) >= 0.006


def test_a_block_that_returns_its_input_takes_no_time_from_the_previous_one():
    module = nn.Sequential(Slow(0.0, 0.004), nn.Identity(), nn.Linear(4, 4))
    record = profile(module, blocks=list(module.named_children()))
    assert min(block(record, "0").backward_s) >= 0.004
    assert block(record, "1").backward_s == (0.0,) * 3


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_forward_belongs_to_the_backward_of_its_block(use_reentrant):
    first, second, last = (nn.Sequential(Slow(0.005, 0.001), nn.Linear(4, 4)) for _ in range(3))

    def loss(x):
        x = checkpoint(nn.Sequential(first, second), x.requires_grad_(), use_reentrant=use_reentrant)
        return last(x)

    record = profile(nn.Sequential(first, second, last), loss=loss)
    for name in ("0", "1"):
        assert min(block(record, name).forward_s) >= 0.005
        assert min(block(record, name).backward_s) >= 0.006
    assert record.is_order_stable
    assert [name[0] for name in names(record)] == list("222211110000")


def test_operations_in_place_can_be_profiled():
    record = profile(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True)))
    assert not record.unused


def test_a_changing_order_is_reported():
    module = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    turns = iter(range(100))

    def loss(x):
        turn = next(turns) // 2  # both steps of a repetition behave the same
        return module["a"](module["b"](x)) if turn % 2 else module["b"](module["a"](x))

    record = profile(module, blocks=[], loss=loss, iters=4)
    assert not record.is_order_stable


def test_a_gradient_that_comes_in_some_steps_is_kept_as_it_came():
    module = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    turns = iter(range(100))

    def loss(x):
        x = module["a"](x)
        return module["b"](x) if next(turns) // 2 % 2 else x

    record = profile(module, blocks=[], loss=loss, iters=4)
    by_name = {p.name: [value is not None for value in p.ready_s] for p in record.parameters}
    assert by_name == {"a.weight": [True] * 4, "b.weight": [True, False, True, False]}
    assert not record.is_order_stable
    assert record.unused == ()


def find_hooks(module):
    found = []
    for part in module.modules():
        found += [*part._forward_hooks.values(), *part._forward_pre_hooks.values(), *part._backward_hooks.values()]
    for param in module.parameters():
        found += [param._backward_hooks, param._post_accumulate_grad_hooks]
    return [hook for hook in found if hook]


def test_no_hook_is_left(monkeypatch):
    module, calls = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), []
    profile(module)
    assert find_hooks(module) == []
    monkeypatch.setattr(job_profile, "mark", lambda device: calls.append(1))
    module(torch.randn(2, 4)).sum().backward()
    assert calls == []


def test_no_hook_is_left_when_a_step_fails():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        profile(module, torch.randn(2, 3))
    assert find_hooks(module) == []


def test_the_default_blocks_are_the_modules_that_are_called():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(4, 4)
            self.stages = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            x = self.stem(x)
            for stage in self.stages:
                x = stage(x)
            return x * self.scale

    record = profile(Model())
    assert [b.name for b in record.blocks] == ["stem", "stages.0", "stages.1"]
    assert [p.name for p in record.parameters_of("outside")] == ["scale"]
    assert [b.name for b in profile(nn.Linear(4, 4)).blocks] == ["model"]


def test_profiles_are_read_again_as_the_files_of_others(tmp_path):
    record = profile(Tied(), torch.tensor([[1, 2]]))
    sizes, times = tmp_path / "layer-sizes.csv", tmp_path / "layer-times.csv"
    sizes.write_text(export_layer_sizes(record.layer_sizes))
    times.write_text(export_layer_times(record.layer_times))
    assert [(r.layer, r.num_params) for r in load_layer_sizes(sizes)] == [("embed", 20), ("body", 20), ("unused", 20)]
    read = {r.layer: r.timing for r in load_layer_times(times)}
    assert list(read) == ["backward", "embed grad", "body grad", "head grad", "unused grad", "forward", "step"]
    assert read["forward"].median_s == record.forward.median_s
    assert read["step"].min_s == min(record.optimizer.reduced_s)
    parts_s = sum(read[name].mean_s for name in list(read)[:5])
    assert parts_s == pytest.approx(record.profiled_backward.mean_s / record.backward_cost.value)


class Two(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize("shared", [nn.GELU(), nn.Linear(4, 4)])
def test_blocks_may_share_a_part_which_belongs_to_the_first(shared):
    record = profile(Two(Two(nn.Linear(4, 4), shared), Two(nn.Linear(4, 4), shared)))
    assert [times.name for times in record.blocks] == ["first", "second"]
    assert {p.block for p in record.parameters if p.name.startswith("first.second")} <= {"first"}


def test_a_block_inside_another_is_a_part_of_that():
    inner = nn.Linear(4, 4)
    record = profile(Two(inner, Two(inner, nn.Linear(4, 4))))
    assert [times.name for times in record.blocks] == ["second"]
    assert {p.block for p in record.parameters} == {"second"}


def test_an_activation_between_blocks_is_a_block():
    record = profile(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.ReLU())))
    assert [times.name for times in record.blocks] == ["0", "1", "2"]
    assert min(block(record, "1").forward_s) > 0


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.ReLU(), "no device, because nothing is trained"),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta")), "are on cpu, meta"),
    ],
)
def test_modules_that_cannot_be_profiled_are_refused(module, reason):
    with pytest.raises(ConfigError, match=reason):
        measure_layers(WORLD, build_replica(module, lambda: F.relu(torch.ones(()))), LABELS, iters=1, warmup=1)


class FakeEvent:
    """Reports when it was recorded and checks that this was after waiting for the device."""

    is_idle = False

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        FakeEvent.is_idle = False
        self.at_s = time.perf_counter()

    def elapsed_time(self, other):
        assert FakeEvent.is_idle
        return (other.at_s - self.at_s) * 1e3


def test_moments_of_a_gpu_are_events_that_are_read_at_the_end(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: setattr(FakeEvent, "is_idle", True))
    clock = LayerClock([], [], torch.device("cuda"))
    for _ in range(2):
        clock.attach(contextlib.ExitStack())
        clock.enter("forward")
        time.sleep(0.002)
        clock.end()
        torch.cuda.synchronize("cuda")
        assert clock.read().took_s["forward"] >= 0.002


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = Slow(0.004, 0.004), nn.Linear(4, 4)

    def forward(self, x, y):
        return self.left(x) + self.right(y)


def profile_own(step, model=None):
    job = OwnJob(TwoInputs() if model is None else model, step)
    try:
        return measure_layers(WORLD, job.build(), job.labels, iters=2, warmup=1)[0]
    finally:
        job.close()


def test_a_users_own_step_is_profiled_by_its_calls():
    model = TwoInputs()
    optimizers = [torch.optim.SGD(model.left.parameters(), 0.1), torch.optim.Adam(model.right.parameters(), 0.1)]
    before = [param.detach().clone() for param in model.parameters()]

    def step(model):
        time.sleep(0.002)  # stands for loading data
        loss = model(torch.ones(3, 4), torch.ones(3, 4)).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    record = profile_own(step, model)
    assert (record.model, record.batch_size, record.dtype) == ("TwoInputs", 3, "fp32")
    assert min(record.forward.reduced_s) >= 0.004 and min(record.backward.reduced_s) >= 0.004
    parts = (record.forward, record.backward, record.optimizer)
    assert record.timing.median_s >= 0.002 + sum(min(part.reduced_s) for part in parts)
    assert min(block(record, "left").forward_s) >= 0.004
    assert {p.name for p in record.parameters} == {"left.weight", "left.bias", "right.weight", "right.bias"}
    assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))
    assert not optimizers[1].state and find_hooks(model) == []


def test_two_backwards_in_a_step_are_one_clock():
    model = TwoInputs()

    def step(model):
        for _ in range(2):
            model(torch.ones(2, 4), torch.ones(2, 4)).sum().backward()
            time.sleep(0.003)

    record = profile_own(step, model)
    assert min(record.backward.reduced_s) >= 0.008
    # Ready only with the second backward; the time in between does not count.
    last = [max(values) for values in zip(*(p.ready_s for p in record.parameters), strict=True)]
    whole = record.profiled_backward.reduced_s
    assert min(last) >= 0.008 and all(a <= b + 1e-6 for a, b in zip(last, whole, strict=True))
    assert min(record.optimizer.reduced_s) >= 0.006


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_backward_inside_of_backward_is_one_phase(use_reentrant):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    entered = []

    class Phases:
        def enter(self, phase):
            entered.append(phase)

    with mark_phases(module, Phases()):
        x = module[0](torch.ones(2, 4))
        checkpoint(module[1], x, use_reentrant=use_reentrant).sum().backward()
    assert entered == ["data_wait", "backward", "optimizer"]


@pytest.mark.parametrize(
    "step",
    [
        lambda model: model(torch.ones(2, 4), torch.ones(2, 4)),
        lambda model: model.right(torch.ones(2, 4)).sum().backward(),
    ],
)
def test_a_step_without_forward_or_backward_is_refused(step):
    with pytest.raises(MeasurementError) as caught:
        profile_own(step)
    assert caught.value.code == "no-phase"
