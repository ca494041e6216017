#!/usr/bin/env python
"""Compare wrappers on NCCL ranks that share one GPU: ours and torch's, default and tuned, interleaved.

    PACELINE_SHARE_GPUS=1 benchmarks/nccl_wrappers.py OUT [--models mlp,resnet18,...] [--ranks 2,4,8] [--iters N]
        [--wrappers torch,paceline,...]

Start CUDA MPS first: the ranks then compute concurrently. Writes one run per model and number of ranks to OUT. The
models are those of `paceline bench wrappers`, with GPU batch sizes, and `transformer`: 64.6 MiB in 6 layers of width
384, with an untied head. gpt2-large runs only with default wrappers, because all ranks' candidates for a tuned wrapper
do not fit on one GPU. All cells take about ten minutes on an H200.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import paceline
from paceline.workloads.data import DataForm
from paceline.workloads.registry import WORKLOADS, Workload

WRAPPERS = ("bare", "torch", "torch-tuned", "paceline", "paceline-tuned")
BATCHES = {"mlp": 64, "resnet18": 64, "gpt2-mini": 16, "transformer": 8, "gpt2": 4, "gpt2-large": 2}
ROUNDS = {"gpt2": 24, "gpt2-large": 12}  # 60 for other models
WIDTH, LAYERS, VOCABULARY, CONTEXT = 384, 6, 8192, 128


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(frozen=True)
class OwnWorkload(Workload):
    def build(self) -> nn.Module:
        return Transformer()


def measure(out: str, models: list[str], ranks: int, iters: int | None, backend: str, wrappers: str) -> None:
    params = [param.numel() for param in Transformer().parameters()]
    form = DataForm("tokens", (CONTEXT,), vocabulary=VOCABULARY)
    WORKLOADS["transformer"] = OwnWorkload("transformer", len(params), sum(params), BATCHES["transformer"], form)
    for model in models:
        try:
            result = paceline.bench.wrappers(
                models=model,
                wrappers=("torch", "paceline") if model == "gpt2-large" else wrappers.split(","),
                ranks=ranks,
                backend=backend,
                batch_size=BATCHES[model],
                iters=iters or ROUNDS.get(model, 60),
                out=Path(out, f"{model}-{ranks}-ranks"),
                progress=False,
            )
        except paceline.ConfigError as error:  # the model does not fit on the GPU
            result = f"{model} on {ranks} ranks: {error}"
        if os.environ["RANK"] == "0":
            print(result, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--models", default=",".join(BATCHES))
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--iters", type=int)
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--wrappers", default=",".join(WRAPPERS), help="tuned wrappers take most of the time")
    given = parser.parse_args()
    for count in map(int, given.ranks.split(",")):
        arguments = given.out, given.models.split(","), count, given.iters, given.backend, given.wrappers
        paceline.run_ranks(measure, count, arguments)
