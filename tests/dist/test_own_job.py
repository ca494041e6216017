"""A user's own model, loss and optimizers, profiled in a plain process, on ranks, and in an existing group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # optimizers import it, which sets an environment variable
import torch.distributed as dist
from torch import nn

import paceline
from paceline.errors import ConfigError
from paceline.measure.job_profile import measure_together
from paceline.measure.step_bench import OwnJob, wrap
from paceline.records import LayerProfileRecord, StepRecord
from paceline.report.profiles import ProfileResult, TraceResult
from paceline.runtime.ranks.world import current_world, join_world
from paceline.training.step import NoPhases
from paceline.verbs.jobs import build_settings

FEW = {"iters": 2, "warmup": 1}


class Pair(nn.Module):
    """Two inputs, one of them embedded; a parameter outside all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.dense, self.head = nn.Embedding(11, 8), nn.Linear(5, 8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: torch.Tensor, *, features: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(torch.relu(self.embed(tokens).mean(1) + self.dense(features)))
        return hidden * self.scale


def build() -> tuple[nn.Module, Any]:
    """Equal models on all ranks, different data, a custom loss, and two optimizers."""
    torch.manual_seed(3)
    model = Pair()
    optimizers = [
        torch.optim.SGD([*model.embed.parameters(), model.scale], lr=0.1),
        torch.optim.SGD([*model.dense.parameters(), *model.head.parameters()], lr=0.01),
    ]
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    tokens, features, target = torch.randint(11, (6, 4)), torch.randn(6, 5), torch.randn(6, 3)

    def step(model: nn.Module) -> None:
        loss = (model(tokens, features=features) - target).abs().mean() + 0.1
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return model, step


def check(result: ProfileResult, world_size: int) -> None:
    profile = result.profile
    assert isinstance(profile, LayerProfileRecord) and (profile.model, profile.batch_size) == ("Pair", 6)
    assert {p.name for p in profile.parameters} == {name for name, _ in Pair().named_parameters()}
    assert profile.num_bytes == sum(p.nbytes for p in Pair().parameters()) and not profile.unused
    assert [block.name for block in profile.blocks] == ["embed", "dense", "head"]
    assert [record.world_size for record in result.steps] == [world_size] * (world_size > 1)
    if world_size > 1:
        (phases,) = result.steps
        assert isinstance(phases, StepRecord) and (phases.data, phases.wrapper) == ("own", "paceline")
        assert phases.num_bytes == profile.num_bytes and phases.busy is not None
        assert "exposed communication" in result.answer


def test_a_module_in_a_plain_process_is_profiled_here_and_left_unchanged(tmp_path: Path) -> None:
    model, step = build()
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = paceline.profile(model, step, **FEW, out=tmp_path)
    assert isinstance(result, ProfileResult) and current_world() is None and not dist.is_initialized()
    check(result, 1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()) and not model.training
    assert all(param.grad is None for param in model.parameters())
    assert result.folder is not None and (result.folder / "ready.png").exists()
    again = paceline.load_result(result.folder)
    assert isinstance(again, ProfileResult) and again.profile == result.profile


def test_a_factory_is_profiled_on_local_ranks() -> None:
    result = paceline.profile(build, ranks=2, **FEW)
    check(result, 2)
    assert result.folder is None and result.config["ranks"] == 2


def test_ranks_of_a_host_take_concurrent_steps_that_send_nothing(on_ranks) -> None:
    given = (build, None, "torch", {"backend": "gloo", "device": "cpu", "threads": 1})
    first, second = on_ranks(2, measure_together, given, 1, 3, 1)
    found = [(r.role, r.wrapper, r.world_size, r.timing.num_ranks, r.timing.count, r.threads) for r in first]
    assert found == [("together", "none", 1, 1, 3, 1), ("together", "none", 2, 2, 3, 1)] and first == second
    few = build_settings(model="cnn", channels=(4, 8), hidden=16, samples=8, batch_size=8, device="cpu")
    assert on_ranks(2, measure_together, few, 1, 2, 1) == [[], []]  # 16 samples are needed


def test_a_module_can_be_traced_here() -> None:
    model, step = build()
    result = paceline.trace(model, step, steps=1, warmup=1)
    assert isinstance(result, TraceResult) and result.facts.batch_size == 6
    assert {"forward", "backward", "optimizer"} <= result.overviews[0].phases_s.keys()


def profile_by_name() -> ProfileResult:
    job = {"channels": (4, 8), "hidden": 16, "samples": 64, "batch_size": 4}
    result: ProfileResult = paceline.profile("cnn", **FEW, **job)
    return result


def test_a_model_by_name_is_profiled_on_ranks_and_predictions_can_read_it(on_ranks) -> None:
    result, other = on_ranks(2, profile_by_name)
    assert result.to_json() == other.to_json() and result.run.environment == other.run.environment
    assert isinstance(result, ProfileResult) and result.profile is not None
    assert result.profile.num_bytes == result.steps[0].num_bytes == 4 * 18_954
    assert result.steps[0].world_size == 2 and result.steps[0].wrapper == "paceline"
    table = paceline.comm_table(result, network="10gbe", ranks=(2, 8))
    assert [row.step.world_size for row in table.rows] == [2, 8]
    assert table.rows[0].step.local_s == pytest.approx(result.profile.timing.median_s, rel=0.2)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((Pair(),), {}),
        ((Pair(), lambda model: None), {"ranks": 2}),
        ((Pair(), lambda model: None), {"batch_size": 4}),
        ((build, lambda model: None), {}),
        ((3,), {}),
        ((build,), {"kind": "everything"}),
        ((build,), {"wrapper": "dp"}),
        (("cnn",), {"colour": "red"}),
        (("cnn",), {"kind": "layers", "ranks": 2}),
    ],
)
def test_jobs_that_cannot_be_profiled_are_refused_at_once(arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        paceline.profile(*arguments, **options)


def step_both_ways(wrapper: str) -> tuple[list[float], list[float]]:
    """The parameters after one step of the wrapped model, and the mean over ranks of the bare models' parameters."""
    with join_world("gloo") as world:
        found = []
        job = OwnJob(build)
        start = Pair().state_dict()
        start = {name: torch.full_like(value, 0.3) for name, value in start.items()}
        for wrap_by in (lambda module: wrap(module, wrapper), None):
            replica = job.build(wrap_by)
            replica.module.load_state_dict(start)
            replica.run(None, NoPhases())
            mine = torch.cat([param.detach().flatten() for param in replica.module.parameters()])
            found.append(torch.stack(world.share(mine)).mean(0).tolist())
            replica.close()
        job.close()
        return found[0], found[1]


@pytest.mark.parametrize("wrapper", ["paceline", "torch"])
def test_the_wrapper_and_the_bare_model_agree(on_ranks, wrapper: str) -> None:
    """SGD steps are linear in the gradient: a step with the mean gradient is the mean of all ranks' steps."""
    for wrapped, bare in on_ranks(2, step_both_ways, wrapper):
        assert max(abs(value - 0.3) for value in bare) > 1e-3  # the parameter has moved
        assert wrapped == pytest.approx(bare, abs=1e-6)


# -- worlds ------------------------------------------------------------------------------------------------------------


def join_all_ways() -> list[Any]:
    found: list[Any] = []
    with join_world("gloo") as world:  # a new world
        found.append((world.rank, world.world_size, world.share(world.rank)))
        with join_world() as again:
            found.append(again is world)
        assert dist.is_initialized()
        try:
            with join_world("nccl"):
                pass
        except ConfigError as error:
            found.append(error.code)
    found.append(dist.is_initialized())
    return found


def test_a_world_is_opened_and_joined(on_ranks) -> None:
    assert on_ranks(2, join_all_ways) == [[(rank, 2, [0, 1]), True, "already-open", False] for rank in range(2)]


def profile_in_a_group_of_ones_own() -> list[Any]:
    dist.init_process_group("gloo")
    with join_world() as world:
        shared = world.share(world.rank)
        assert current_world() is world and world.backend == "gloo" and world.shares_clock
    assert dist.is_initialized() and current_world() is None
    model, step = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = paceline.profile(model, step, **FEW)
    check(result, 2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch_result = paceline.profile(build, kind="phases", wrapper="torch", **FEW)
    (record,) = torch_result.steps
    total = torch.ones(())
    dist.all_reduce(total)  # the program's own group still works
    dist.destroy_process_group()
    answers = json.dumps([one.to_json() for one in (result, torch_result)])
    return [shared, total.item(), record.wrapper, record.busy is not None, answers]


def test_a_program_that_opened_its_own_group(on_ranks) -> None:
    """Warm ranks have torchrun's variables, so this runs as under torchrun. Other tests start torchrun itself."""
    first, second = on_ranks(2, profile_in_a_group_of_ones_own)
    assert first == second and first[:4] == [[0, 1], 2.0, "torch", True]
