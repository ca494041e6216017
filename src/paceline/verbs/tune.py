"""`paceline.tune`: which buckets are best for a job on these ranks, how much they gain, and how sure that is."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError
from paceline.predict.tuning import TuneSettings
from paceline.runtime.environment import is_launched
from paceline.runtime.session import choose_ranks, open_session
from paceline.units import parse_size, parse_sizes

if TYPE_CHECKING:
    from torch import nn

    from paceline.report.tuning import TuneResult

# Small, unless given: buckets matter where there is little arithmetic to hide them.
BATCH_SIZE = 4
NETWORK_RANKS = 8


def tune(
    model: nn.Module | Callable[[], Any] | str,
    step: Callable[[nn.Module], Any] | None = None,
    *,
    ranks: int | None = None,
    wrapper: str = "paceline",
    quick: bool = False,
    confirm: bool = True,
    caps: str | Sequence[str | int] = (),
    network: str | None = None,
    network_ranks: int | None = None,
    iters: int | None = None,
    backend: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    out: str | Path | None = None,
    progress: bool | None = None,
    **job: Any,
) -> TuneResult:
    """Which buckets? Measures the job, predicts every plan, confirms the best in turns, and returns the plan.

    `model` is your module and `step(model)` runs one forward and backward of it (and may update), inside a launched
    world; or `model` is a factory that returns (model, step), which is started on `ranks` local ranks; or a name of
    `paceline train --model`, with the options of `paceline.train` as further arguments (`data`, `batch_size`, ...).
    `wrapper` is paceline or torch. `caps` are bucket sizes to run ("1MiB,25MiB"); by default a range. Without
    `confirm` the job is never run under a plan. With `network`, one rank computes, and its buckets take as long as on
    that network of `network_ranks` ranks. With `out` the run is saved in a folder there.
    Inside a launched world this is collective: every rank must call it and gets the same result.
    """
    from paceline.report.tuning import TuneResult
    from paceline.training.settings import TrainSettings, check_job, takes_cap_lists

    if network is None and network_ranks is not None:
        raise ConfigError(f"--network-ranks {network_ranks} without a --network to emulate: leave it out, or name one")
    settings = TuneSettings(
        wrapper=wrapper,
        effort="quick" if quick else "full",
        caps_bytes=_read_caps(caps),
        confirms=confirm,
        iters=iters,
        network=network,
        network_ranks=NETWORK_RANKS if network_ranks is None else network_ranks,
        takes_lists=wrapper != "torch" or takes_cap_lists(),
    )
    _check_model(model, step)
    is_pair = step is not None
    if is_pair and not is_launched() and network is None:
        raise ConfigError(
            "a module and its step are tuned in a launched world: start this program with torchrun, or pass a factory "
            "that returns (model, step), which is started on local ranks",
            code="not-launched",
        )
    (count,), _ = choose_ranks(None if ranks is None else (ranks,), (2,) if network is None else (1,))
    settings.check(count)
    config: dict[str, Any]
    load: str
    arguments: tuple[Any, ...]
    if isinstance(model, str):
        values = {"batch_size": BATCH_SIZE} | {name: value for name, value in job.items() if value is not None}
        train = TrainSettings(
            model=model, ranks=count, wrapper=wrapper, backend=backend, device=device, threads=threads, **values
        )
        check_job(train)
        if train.batches.accumulate != 1:
            raise ConfigError(
                f"--accumulate {train.batches.accumulate}: gradients travel with the last micro-batch alone, so tune "
                "without it; the plan is the same"
            )
        config, load, arguments = train.to_json(), "paceline.measure.tuning:tune_job", (settings, train)
    else:
        if job:
            raise ConfigError(f"{', '.join(job)}: options of a model by name; your own job sets them itself")
        name = type(model).__name__ if is_pair else getattr(model, "__name__", "factory")
        where = {"backend": backend, "device": device, "threads": threads}
        config = {"model": name, "ranks": count, "wrapper": wrapper, **where}
        if not is_pair and not is_launched():
            _check_factory(model, name)
        load = "paceline.measure.tuning:tune_own"
        arguments = (settings, model, step, name if is_pair else "", where)
    with open_session("tune", config, ranks=count, out=out, progress=progress, here=is_pair) as session:
        records, gradients, default_plan = session.ask(load, arguments)
        session.config |= settings.to_json(gradients, default_plan)
        result = TuneResult(session.save(records), session.folder)
        session.write(result)
        return result


def _check_model(model: Any, step: Any) -> None:
    """Refuse what is neither a module with its step, nor a factory, nor a name."""
    if isinstance(model, str):
        if step is not None:
            raise ConfigError(f"model {model!r} with a step: a model by name has its own; pass a module with a step")
        return
    if step is None and hasattr(model, "named_parameters"):
        raise ConfigError(
            f"{type(model).__name__} without a step: pass step(model), which runs one forward and backward",
            code="no-step",
        )
    if not callable(model) or (step is not None and not callable(step)):
        raise ConfigError(
            f"model is {type(model).__name__} and step is {type(step).__name__}: pass a module and a function "
            "step(model), a factory that returns both, or the name of a model"
        )


def _check_factory(factory: Callable[[], Any], name: str) -> None:
    """Refuse a factory that cannot be sent to the ranks, before any starts."""
    try:
        pickle.dumps(factory)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"the factory {name} cannot be sent to another process ({error}): define it at the top level of a module",
            code="not-picklable",
        ) from None


def _read_caps(caps: str | Sequence[str | int]) -> tuple[int, ...]:
    if isinstance(caps, str):
        return parse_sizes(caps)
    return tuple(parse_size(cap) if isinstance(cap, str) else cap for cap in caps)
