"""The parity matrix: every reducer and several plans, compared with one process that sees the whole batch.

Results equal those of that process up to rounding, and are bit-identical on all ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.parallel.replicas import read_replica
from paceline.plan import Plan
from tests.conftest import ASKED_BACKEND, BACKEND
from tests.dist.parity_models import CASES, Batch, Case, build_momentum, measure_loss
from tests.dist.wrapped import here
from tests.unit.made_plans import plan_by_cap, plan_in_pieces

BACKENDS = [ASKED_BACKEND] if ASKED_BACKEND else sorted({"gloo", BACKEND})
Record = dict[str, torch.Tensor | None]
KIB = 1 / 1024  # in MiB, the unit of caps
TOLERANCES = {
    torch.float32: 1e-5, torch.complex64: 1e-5, torch.float64: 1e-13, torch.complex128: 1e-13, torch.bfloat16: 2e-2,
}  # fmt: skip


def plan_split(module: nn.Module) -> Plan:
    """Splits most gradients across several buckets; some pieces get their own bucket, others share one."""
    gradients = read_replica(module).gradients
    return plan_in_pieces(gradients, reversed(range(len(gradients))), cap_bytes=90, tail_bytes=20)


def plan_backwards(module: nn.Module) -> Plan:
    """The first bucket is ready last."""
    gradients = read_replica(module).gradients
    return plan_by_cap(gradients, range(len(gradients)), cap_bytes=200)


@dataclass(frozen=True)
class Variant:
    """A reducer and a rule for its plan; `is_so(plan)` checks that the plan matches the name."""

    name: str
    options: Callable[[nn.Module], dict[str, Any]]
    is_so: Callable[[Plan], bool] = lambda plan: True
    is_sharded: bool = False  # each rank has only its shard of the averages, and uses the wrapper's optimizer
    is_lossy: bool = False  # results differ from one process, but are equal on all ranks
    period: int = 1  # steps between two syncs of parameters; above 1, gradients are not averaged


def count_families(plan: Plan) -> int:
    return len({gradient.family for gradient in plan.gradients})


def is_cut(plan: Plan) -> bool:
    return len(plan.buckets) > count_families(plan)


REDUCERS = (
    Variant("bucketed, default plan", lambda module: {}),
    Variant("bucketed, tiny cap", lambda module: {"bucket_cap_mb": 0.03 * KIB}, is_cut),
    Variant(
        "bucketed, one bucket",
        lambda module: {"bucket_cap_mb": 1000},
        lambda plan: len(plan.buckets) == count_families(plan),
    ),
    Variant("bucketed, split gradients", lambda module: {"plan": plan_split(module)}, lambda plan: plan.is_split),
    Variant("bucketed, plan in forward order", lambda module: {"plan": plan_backwards(module)}),
    Variant(
        "bucketed, torch's rule",
        lambda module: {"bucket_cap_mb_list": [0.03 * KIB, 0.15 * KIB]},
        lambda plan: plan.rule.startswith("torch's rule") and is_cut(plan),
    ),
    Variant("simple", lambda module: {"reducer": "simple"}),
)
# Exact strategies, with settings that send everything.
STRATEGIES = (
    Variant("top-k of everything", lambda module: {"strategy": "topk:1", "bucket_cap_mb": 0.15 * KIB}),
    Variant("PowerSGD of full rank", lambda module: {"strategy": "powersgd:1000", "bucket_cap_mb": 0.15 * KIB}),
    Variant("zero1", lambda module: {"strategy": "zero1", "bucket_cap_mb": 0.15 * KIB}, is_sharded=True),
)


def build_lossy(text: str, period: int = 1) -> Variant:
    options = {"strategy": text} if period > 1 else {"strategy": text, "bucket_cap_mb": 0.15 * KIB}
    return Variant(text, lambda module: options, is_sharded="zero1" in text, is_lossy=True, period=period)


LOSSY = (
    *map(build_lossy, ("bf16", "int8", "int4", "topk:0.1", "topk:0.1,dgc,warmup=4", "powersgd:2", "zero1+bf16")),
    *(build_lossy(text, 2) for text in ("localsgd:2", "slowmo:2+bf16", "diloco:2+int8")),
    build_lossy("diloco:2,fragments=2,delay=1", 100),
)
VARIANTS = {"reducers": REDUCERS, "strategies": STRATEGIES, "lossy": LOSSY}


# -- training, on all ranks and in one process ------------------------------------------------------------------------


def build(case: Case, rank: int) -> nn.Module:
    torch.manual_seed(1000 * rank + 7)  # differs between ranks, to reveal values that are not broadcast
    return case.build().to(here())


def find_batches(case: Case, step: int, rank: int, world_size: int) -> list[Batch]:
    return [batch.to(here()) for batch in case.batches(step, rank, world_size)]


def find_loss(case: Case, model: nn.Module, batch: Batch) -> torch.Tensor:
    dtype = torch.float16 if here().type == "cuda" else torch.bfloat16
    with torch.autocast(here().type, dtype, enabled=case.amp):
        return measure_loss(model, batch) / case.micro


def build_scaler(case: Case) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(here().type, init_scale=64.0, growth_interval=2, enabled=case.amp)


def prepare_gradients(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    if case.zero.startswith("to "):
        optimizer.zero_grad(set_to_none=case.zero == "to none")
    for number, param in enumerate(model.parameters()):
        if case.zero == "replaced" and param.grad is not None:
            # On all ranks except rank 0, the strides differ from the parameter's.
            param.grad = param.grad.clone(memory_format=torch.contiguous_format if rank else torch.preserve_format)
        elif case.zero == "some" and number % 2:
            param.grad = None


def note(record: Record, step: int, model: nn.Module, what: str) -> None:
    for name, param in model.named_parameters():
        value = param.grad if what == "gradient" else param
        record[f"{what} of {name} in step {step}"] = None if value is None else value.detach().clone()


def note_buffers(record: Record, model: nn.Module) -> None:
    record |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}


def count_messages() -> int:
    return dist.group.WORLD._get_sequence_number_for_group()


def train_together(case: Case, reducer: Variant, world: paceline.World) -> Record:
    module = build(case, world.rank)
    model = paceline.DDP(module, check_replicas_every=2, **case.options, **reducer.options(module))
    optimizer = case.optimizer(model.parameters())
    if reducer.is_sharded:
        optimizer = model.shard_optimizer(case.optimizer([p for p in model.parameters() if p.requires_grad]))
    record: Record = {}
    scaler = build_scaler(case)
    for step in range(case.steps):
        prepare_gradients(case, module, optimizer, world.rank)
        *quiet, last = find_batches(case, step, world.rank, world.world_size)
        before = count_messages()
        for batch in quiet:
            with model.no_sync() if case.quiet == "whole" else contextlib.nullcontext():
                loss = scaler.scale(find_loss(case, model, batch))
                with model.no_sync() if case.quiet == "backward" else contextlib.nullcontext():
                    loss.backward()
        assert count_messages() == before, "no_sync has sent something"
        scaler.scale(find_loss(case, model, last)).backward()
        if not reducer.is_sharded and reducer.period == 1:
            note(record, step, module, "gradient")
        scaler.step(optimizer)
        scaler.update()
        if (step + 1) % reducer.period == 0:
            note(record, step, module, "value")
    if reducer.period > 1:
        model.sync_parameters()
        note(record, case.steps, module, "value")
    note_buffers(record, module)
    if model.plan is not None:
        assert reducer.is_so(model.plan), f"the plan is not what the test means: {model.plan}"
    model.stop()
    return record


def train_alone(case: Case, world_size: int) -> Record:
    """Plain torch in one process, on the batches of all ranks."""
    model = build(case, 0)
    optimizer = case.optimizer(model.parameters())
    record: Record = {}
    scaler = build_scaler(case)
    for step in range(case.steps):
        prepare_gradients(case, model, optimizer, 0)
        shards = [find_batches(case, step, rank, world_size) for rank in range(world_size)]
        if case.by_shard:
            run_shards(case, model, shards, scaler)
        else:
            batches = [batch for shard in shards for batch in shard]
            measure_loss(model, Batch(torch.cat([b.x for b in batches]), torch.cat([b.y for b in batches]))).backward()
        note(record, step, model, "gradient")
        scaler.step(optimizer)
        scaler.update()
        note(record, step, model, "value")
    note_buffers(record, model)
    return record


def run_shards(case: Case, model: nn.Module, shards: list[list[Batch]], scaler: torch.amp.GradScaler) -> None:
    """Run each shard separately with the weights of the case, and average the running statistics."""
    samples = [sum(len(batch.y) for batch in shard) for shard in shards]
    by_samples = case.options.get("average") == "samples"
    before = [buffer.clone() for buffer in model.buffers()]
    after: list[list[torch.Tensor]] = []
    for shard, count in zip(shards, samples, strict=True):
        weight = count / sum(samples) if by_samples else 1 / len(shards)
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
        for batch in shard:
            scaler.scale(find_loss(case, model, batch) * weight).backward()
        after.append([buffer.clone() for buffer in model.buffers()])
    for buffer, *values in zip(model.buffers(), *after, strict=True):
        buffer.copy_(torch.stack(values).double().mean(0))


# -- comparing ---------------------------------------------------------------------------------------------------------


def digest(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "none"
    values = tensor.cpu().contiguous().reshape(-1)
    return hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest() if values.numel() else "empty"


def find_unequal(digests: list[dict[str, str]]) -> list[str]:
    """Entries that are not bit-identical on all ranks."""
    return [
        f"{name} differs between rank 0 and rank {rank}"
        for rank, other in enumerate(digests[1:], start=1)
        for name in digests[0]
        if other[name] != digests[0][name]
    ]


def find_far(case: Case, record: Record, wanted: Record) -> list[str]:
    """Entries that differ from the reference by more than rounding."""
    if list(record) != list(wanted):
        return [f"the records differ: {sorted(record.keys() ^ wanted.keys())}"]
    far = []
    for name, want in wanted.items():
        got = record[name]
        if got is None or want is None:
            if got is not want:
                far.append(f"{name} is {'' if got is None else 'not '}None, unlike in one process")
        elif (got.shape, got.dtype) != (want.shape, want.dtype):
            far.append(f"{name} is {tuple(got.shape)} {got.dtype}, not {tuple(want.shape)} {want.dtype}")
        elif want.numel():
            dtype = torch.bfloat16 if case.amp else want.dtype
            allowed = TOLERANCES.get(dtype, 0.0) * max(0.1, want.abs().max().item())
            error = (got - want).abs().max().item()
            if not error <= allowed:
                far.append(f"{name} is off by {error:.2e}, allowed {allowed:.1e}")
    return far


def run_cases(names: list[str], backend: str, variants: str = "reducers") -> list[str]:
    """Run cases on all reducers in one world. Returns the failures, each with its case and reducer."""
    with paceline.init(backend, "cpu", announce=None, timeout_s=60) as world:
        return [line for name in names for line in run_case(name, world, variants)]


def can_run(reducer: Variant, case: Case) -> bool:
    """Sharded averages cannot be accumulated, momentum applies only once, and schedules cannot weight by samples."""
    return not (
        (reducer.is_sharded and case.zero not in ("to none", "to zeros"))
        or ("dgc" in reducer.name and case.optimizer is build_momentum)
        or (reducer.period > 1 and "average" in case.options)
    )


def run_case(name: str, world: paceline.World, variants: str) -> list[str]:
    case = CASES[name]
    torch._C._set_mkldnn_enabled(True)  # a bf16 case turns it off on some CPUs
    starts = world.share([digest(tensor.detach()) for tensor in build(case, world.rank).parameters()])
    assert all(start != starts[0] for start in starts[1:]), "equal starts would hide a missing broadcast"
    wanted = train_alone(case, world.world_size) if world.rank == 0 and variants != "lossy" else None
    found = []
    for reducer in VARIANTS[variants]:
        if not can_run(reducer, case):
            continue
        label = f"[{reducer.name}] x [{name}] on {world.world_size} ranks, {world.backend}"
        record, error = {}, ""
        try:
            record = train_together(case, reducer, world)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        errors, digests = zip(*world.share((error, {key: digest(value) for key, value in record.items()})), strict=True)
        if any(errors):
            found += [f"{label}, rank {rank}: {text}" for rank, text in enumerate(errors) if text]
            assert all(errors), "\n".join(found)  # if only some ranks failed, the next reducer cannot be tested
            continue
        wrong = find_unequal(digests)
        if wanted is not None:
            skips = "gradient of" if reducer.is_sharded else "\0"
            wrong += find_far(case, record, {key: value for key, value in wanted.items() if not key.startswith(skips)})
        found += [f"{label}: {line}" for line in wrong[:4]] + [f"{label}: {len(wrong)} in all"] * (len(wrong) > 4)
    return found


# Cases are divided among jobs, which alternate between two ranks on one backend and three on the other. The other half
# is slow; `make test-gloo` runs the gloo part of it.
WORLDS = list(zip((2, 3), BACKENDS * 2, strict=False))
NUM_PARTS = 6


@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, NUM_PARTS))])
def test_every_reducer_trains_like_one_process(on_ranks, part, turn):
    world_size, backend = WORLDS[(part + turn) % 2]
    lines = on_ranks(world_size, run_cases, list(CASES)[part::NUM_PARTS], backend)
    found = [line for each in lines for line in each]
    assert not found, "\n".join(["", *dict.fromkeys(found)])


# Codecs send real float32 numbers.
SENT = [name for name in CASES if "64" not in name and "complex" not in name]
COMMON = ("plain", "tied", "unused", "bfloat16", "batchnorm", "uneven")


@pytest.mark.parametrize("names", [COMMON, pytest.param([n for n in SENT if n not in COMMON], marks=pytest.mark.slow)])
def test_exact_strategies_train_like_one_process(on_ranks, names):
    assert set(COMMON) <= set(SENT)
    for world_size, backend in WORLDS:
        lines = on_ranks(world_size, run_cases, list(names), backend, "strategies")
        found = [line for each in lines for line in each]
        assert not found, "\n".join(["", *dict.fromkeys(found)])
