"""What the benchmark of data-parallel wrappers is asked to do, checked before any rank starts. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import ConfigError
from paceline.measure.settings import GroupSettings, check_name
from paceline.workloads.registry import WORKLOADS

__all__ = ["DEFAULT_MODELS", "MAX_CANDIDATES", "WRAPPERS", "WrapperSettings"]

WRAPPERS = (
    "bare",
    "torch",
    "torch-tuned",
    "paceline",
    "paceline-per_parameter",
    "paceline-flat",
    "paceline-overlap",
)
# What two cores step through in minutes; the others are for GPUs and must be asked for.
DEFAULT_MODELS = ("mlp", "cnn", "resnet18", "gpt2-mini", "tiny")
# Ways to run torch's wrapper that `torch-tuned` chooses from: its own caps, five others, one bucket, and our plan.
MAX_CANDIDATES = 8


@dataclass(frozen=True, kw_only=True)
class WrapperSettings(GroupSettings):
    """`bench wrappers`: each model on each number of ranks, all wrappers in turns. `batch_size` is one rank's, and None
    means the model's own."""

    memory_words: ClassVar[tuple[str, str]] = (
        "the replicas of one model take",
        "leave out a large --model or some of --wrapper",
    )

    models: tuple[str, ...] = DEFAULT_MODELS
    wrappers: tuple[str, ...] = WRAPPERS
    batch_size: int | None = None

    def check(self) -> None:
        for what, names, known in (("model", self.models, WORKLOADS), ("wrapper", self.wrappers, WRAPPERS)):
            if not names:
                raise ConfigError(f"no {what} given: known are {', '.join(known)}")
            for name in names:
                check_name(what, name, known)
        super().check()
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"--dtype {self.dtype}: wrappers are timed in float32 or bfloat16 (autocast)")
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(f"--batch-size {self.batch_size}: at least 1, or leave it out for the model's own")

    def batch_of(self, model: str) -> int:
        """Samples per rank in one step of this model."""
        return WORKLOADS[model].batch_size if self.batch_size is None else self.batch_size

    def replica_bytes(self, model: str, num_backends: int) -> int:
        """What all replicas of one model take on one rank: for each its parameters and its wrapper's buffers; for the
        one that steps also its gradients, and what a reduction copies. Activations come on top."""
        replicas = num_backends * len(self.wrappers)
        if "torch-tuned" in self.wrappers:  # its candidates are tried before, on one backend after the other
            replicas = max(replicas, MAX_CANDIDATES)
        return (2 * replicas + 2) * 4 * WORKLOADS[model].num_elements

    @property
    def bytes_per_rank(self) -> int:
        return max(self.replica_bytes(model, len(self.backends)) for model in self.models)
