"""`paceline.tune`: the best buckets for a job on these ranks, how much they gain, and how certain that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from paceline.errors import ConfigError, refuse
from paceline.predict.strategy_costs import EVERY, list_strategies
from paceline.predict.tuning import TuneSettings
from paceline.runtime.ranks.place import is_launched
from paceline.training.train_settings import TrainSettings, takes_cap_lists
from paceline.verbs.jobs import Place, Sizes, brings_data, choose_world, finish, list_sizes, open_job

if TYPE_CHECKING:
    from torch import nn

    from paceline.report.predictions import TuneResult

# Kept small so compute does not hide communication.
JOB_DEFAULTS = {"batch_size": 4}


def tune(
    model: nn.Module | Callable[[], Any] | str, step: Callable[[nn.Module], Any] | None = None, *,
    ranks: int | None = None, wrapper: str = "paceline", quick: bool = False, confirm: bool = True, caps: Sizes = (),
    network: str | None = None, network_ranks: int | None = None, iters: int | None = None,
    budget: float | None = None, strategy: str | Sequence[str] | None = None, backend: str = "auto",
    device: str = "auto", threads: int | None = None, out: Place = None, progress: bool | None = None, **job: Any,
) -> TuneResult:  # fmt: skip
    """Which buckets are best? Measures the job, predicts all plans, compares the best ones, and returns the winner.

    Inside a launched world this is collective: every rank must call it and gets the same result.

    Args:
        model: Your module, inside a launched world, with `step`. Or a factory that returns (model, step), which is
            started on `ranks` local ranks. Or the name of a built-in model, as in `paceline train --model`.
        step: `step(model)` runs one forward and backward pass of the module, and may step the optimizer.
        ranks: Number of ranks, for a factory or a built-in model. Default: the launched world's, else 2.
        wrapper: paceline or torch.
        quick: Try fewer bucket sizes and rounds, for a less certain answer in about a minute.
        confirm: If False, only predict; do not run the job with any plan.
        caps: Bucket sizes to run: 1MiB,4MiB,25MiB. Default: a range.
        iters: Number of timed steps. Default: as time allows.
        network: Emulate this network: one rank computes, and its messages take as long as on that network.
        network_ranks: Number of ranks on that network, including this one. Default: 8.
        budget: Time limit for comparing plans, in seconds. Default: 60, or 30 with `quick`.
        strategy: "all", or a list ("bf16,int8"): predict every strategy. bf16 and the named ones are also measured; for
            "all", bf16 and the best lossy one. `result.plan` is always for exact gradients.
        out: Save the run in a new subfolder of this folder.
        job: Options of `paceline.train`, for a built-in model (`data`, `batch_size`, ...).
    """
    is_odd = network is None and network_ranks is not None
    refuse((is_odd, f"--network-ranks {network_ranks} without a --network to emulate: leave it out, or name one"))
    strategies = () if strategy is None else tuple(one.text for one in list_strategies(strategy))
    settings = TuneSettings(
        wrapper=wrapper, effort="quick" if quick else "full", caps_bytes=list_sizes(caps), confirms=confirm,
        iters=iters, network=network, network_ranks=8 if network_ranks is None else network_ranks,
        takes_lists=wrapper != "torch" or takes_cap_lists(), race_s=budget,
        strategies=EVERY if strategy == "all" else strategies,
    )  # fmt: skip
    job |= {"wrapper": wrapper, "backend": backend, "device": device, "threads": threads}
    if not isinstance(model, str) and callable(step) and not is_launched() and network is None:
        advice = (
            "start this program with torchrun, or pass a factory that returns (model, step), started on local ranks"
        )
        raise ConfigError(f"a module and its step can only be tuned in a launched world: {advice}", code="not-launched")
    count = choose_world(ranks, 2 if network is None else 1)
    settings.check(count)
    if isinstance(model, str):
        job = {name: value for name, value in job.items() if value is not None}
        if not brings_data(model, job.get("data")):
            job = JOB_DEFAULTS | job
    opened, given = open_job("tune", model, step, count, job, out, progress)
    parts = given.batches.accumulate if isinstance(given, TrainSettings) else 1
    refuse((parts != 1, f"--accumulate {parts}: gradients are only sent with the last micro-batch; tune without it"))
    with opened as session:
        if confirm and not quick:
            session.say_long(settings.amount.budget_s + (settings.race_s or settings.amount.confirm_s))
        records, *found = session.ask("paceline.measure.plan_bench:tune_job", (settings, given))
        session.config |= settings.to_json(*found)
        return cast("TuneResult", finish(session, records))
