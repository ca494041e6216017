"""`paceline.tune` for a user's own job: a module with two inputs, a custom loss, and two optimizers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.errors import ConfigError, PacelineError
from paceline.measure.step_bench import OwnJob
from paceline.plan import Plan
from paceline.predict.race import VERDICTS
from paceline.records import CodecRecord, LayerProfileRecord, StepRecord
from paceline.report.predictions import TuneResult


class TwoTowers(nn.Module):
    """Embeds tokens, projects features, and compares the two."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 16)
        self.features = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 16))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return self.scale * (self.tokens(tokens).mean(1) * self.features(features)).sum(1)


def build():
    torch.manual_seed(3)
    model = TwoTowers()
    dense = [model.scale, *model.features.parameters()]
    optimizers = (torch.optim.SGD(model.tokens.parameters(), lr=0.1), torch.optim.AdamW(dense, lr=0.01))
    tokens, features, wanted = torch.randint(0, 50, (6, 5)), torch.randn(6, 12), torch.randn(6)

    def step(model: nn.Module) -> None:
        loss = (model(tokens, features) - wanted).abs().pow(1.5).mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return model, step


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> TuneResult:
    """One tuning from a plain process, on two ranks that it starts."""
    out = tmp_path_factory.mktemp("runs")
    return paceline.tune(build, ranks=2, quick=True, iters=3, caps="1KiB,16KiB", backend="gloo", out=out)


def test_a_factory_is_tuned_on_its_own_ranks(tuned):
    steps = [record for record in tuned.records if isinstance(record, StepRecord)]
    assert all((r.model, r.data, r.batch_size, r.world_size) == ("TwoTowers", "own", 6, 2) for r in steps)
    assert all(len(record.turns_s) == 3 and record.timing.num_ranks == 2 for record in steps)
    assert {record.role for record in steps} >= {"plain", "local", "job"}
    (profile,) = (record for record in tuned.records if isinstance(record, LayerProfileRecord))
    parameters = dict(build()[0].named_parameters())
    assert {p.name: p.num_bytes for p in profile.parameters} == {n: p.nbytes for n, p in parameters.items()}
    assert tuned.verdict in VERDICTS and tuned.answer.startswith("TwoTowers on 2 ranks")
    assert tuned.gain_interval[0] <= tuned.gain <= tuned.gain_interval[1] and tuned.regret[0] <= tuned.regret[1]
    assert {gradient.name for gradient in tuned.plan.gradients} == set(parameters)
    assert tuned.next_steps == ("paceline.DDP(model, plan=result.plan)",)


def test_the_wrapper_uses_the_simulated_buckets(tuned):
    assert [point.cap_bytes for point in tuned.candidates] == [1 << 10, 16 << 10]
    for point in tuned.candidates:
        assert point.measured.bucket_bytes == point.bucket_bytes and point.same_layout
    assert tuned.candidates[0].num_buckets > tuned.candidates[1].num_buckets
    (default,) = (r for r in tuned.records if isinstance(r, StepRecord) and r.label == "default")
    assert default.bucket_bytes == tuned.tuning.candidates[0].plan.bucket_bytes


def test_a_saved_tuning_gives_the_same_answer_and_predicts(tuned):
    again = paceline.load_result(tuned.folder)
    assert isinstance(again, TuneResult) and again.to_json() == tuned.to_json() and again.plan == tuned.plan
    for source in (tuned, tuned.folder):
        predicted = paceline.predict(source, network="1gbe", ranks=64)
        low_s, high_s = predicted.interval
        assert low_s <= predicted.step_s <= high_s and predicted.exposed_s > 0
    assert predicted.next_steps == ("paceline.tune(model, step, network='1gbe', network_ranks=64)",)


def tune_in_a_program() -> dict:
    """A program under torchrun that opens its own group, like programs for torch's wrapper."""
    dist.init_process_group("gloo")
    try:
        model, step = build()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model.eval()
        result = paceline.tune(model, step, quick=True, iters=2, caps="1KiB,16KiB")
        after = model.state_dict()
        restored = all(torch.equal(before[name], after[name]) for name in before) and not model.training
        wrapped = paceline.DDP(model, plan=result.plan)
        step(wrapped)
        used = wrapped.plan.bucket_bytes
        wrapped.stop()
    finally:
        dist.destroy_process_group()
    return {
        "answer": result.answer, "plan": result.plan.to_json(), "restored": restored, "folder": result.folder,
        "moved": any(not torch.equal(before[name], value) for name, value in model.state_dict().items()),
        "used": used, "wanted": result.plan.bucket_bytes, "times": [r.timing.seconds for r in result.records],
        "layouts": [point.same_layout for point in result.candidates],
        "checksum": float(sum(value.double().sum() for value in model.state_dict().values())),
    }  # fmt: skip


@pytest.mark.slow
def test_a_module_and_its_step_are_tuned_in_a_launched_world(on_ranks):
    first, second = on_ranks(2, tune_in_a_program, timeout_s=200)
    assert first == second  # every rank has the same answer, records and plan, and the same replica afterward
    assert first["restored"] and first["moved"] and all(first["layouts"]) and len(first["layouts"]) == 2
    assert first["used"] == first["wanted"] == Plan.from_json(first["plan"]).bucket_bytes
    assert first["folder"] is None


def build_only_a_model():
    return TwoTowers()


def build_without_parameters():
    return nn.Identity(), lambda model: None


def build_a_triple():
    return nn.Linear(2, 2), lambda model: None, None


@pytest.mark.parametrize("factory", [build_only_a_model, build_without_parameters, build_a_triple])
def test_a_factory_must_return_a_module_that_learns_and_its_step(factory):
    with pytest.raises(ConfigError):
        OwnJob(factory)


def test_a_wrong_factory_is_an_error_in_the_caller():
    with pytest.raises(ConfigError, match="TwoTowers"):
        paceline.tune(build_only_a_model, network="10gbe", quick=True, iters=2, backend="gloo")


@pytest.mark.parametrize(
    ("arguments", "options", "code"),
    [
        (build(), {}, "not-launched"),
        (build()[:1], {}, "no-step"),
        ((lambda: build(),), {}, "not-picklable"),
        ((build,), {"ranks": 1}, "ranks"),
        ((build,), {"batch_size": 4}, ""),
        ((build()[0], "no function"), {}, ""),
        ((3,), {}, ""),
        (("cnn", build()[1]), {}, ""),
    ],
)
def test_jobs_that_cannot_be_tuned_are_refused_before_a_rank_starts(monkeypatch, arguments, options, code):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_JOB_ID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("paceline.verbs.jobs.open_session", lambda *_, **__: pytest.fail("a session was opened"))
    with pytest.raises(PacelineError) as caught:
        paceline.tune(*arguments, **options)
    assert isinstance(caught.value, ConfigError) and caught.value.code == code


@pytest.mark.slow
def test_strategies_are_compared_with_exact_plans(tmp_path):
    result = paceline.tune(build, ranks=2, quick=True, iters=3, caps="16KiB", backend="gloo", strategy="int8,diloco:10")
    labels = [candidate.label for candidate in result.tuning.candidates]
    assert labels[0] == "default" and labels[-2:] == ["bf16", "int8"]
    raced = {record.label: record for record in result.records if isinstance(record, StepRecord) and record.note}
    assert set(raced) == set(labels)
    assert all(len(raced[label].turns_s) == 3 and raced[label].bucket_bytes for label in labels)
    codecs = [record for record in result.records if isinstance(record, CodecRecord)]
    assert {"bf16", "int8"} <= {record.strategy for record in codecs} and {r.world_size for r in codecs} == {2}
    assert {part.num_ranks for record in codecs for part in record.parts} == {2}  # ranks compute at the same time
    elements = sum(parameter.num_elements for parameter in result.only(LayerProfileRecord)[0].parameters)
    assert codecs[0].num_bytes == 4 * elements
    assert {(), (50, 16)} <= {parameter.shape for parameter in result.only(LayerProfileRecord)[0].parameters}
    # A lossy plan was not requested, so the plan is one of the exact candidates.
    assert result.tuning.answer.strategy.is_exact and "paceline scale strategies" in result.answer
    predicted = {row["strategy"]: row for row in result.to_json()["strategies"]}
    assert predicted["bf16"]["sent_bytes"] == 2 * elements and predicted["diloco:10"]["measured_s"] is None
    assert predicted["int8"]["measured_s"] == raced["int8"].timing.median_s
