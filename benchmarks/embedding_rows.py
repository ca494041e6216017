#!/usr/bin/env python
"""Measure the gain from sending embedding gradients as rows: `embeddings="dense"` against `"rows"`, alternating.

    benchmarks/embedding_rows.py [--rate 1gbit] [--model gpt2-mini] [--batch-size 4] [--rounds 40] [--json FILE]

The two hosts are network namespaces of this machine, as in `limited_link.py`; needs root, `ip` and `tc`. `--rate none`
runs both ranks over loopback. `--model hf` is a transformers GPT-2 of gpt2-mini's size. Each variant runs with its
default plan and with the best of several caps, measured beforehand. `alone` is the same step without communication:
exposed = step - alone. Times are medians over rounds; ratios are medians of the ratios within each round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from limited_link import run_again

import paceline
from paceline.parallel import DDP
from paceline.records.samples import compare_times
from paceline.workloads.registry import MODELS, ModelOptions, build_model

WARMUP = 4


def build(name: str, tokens: int) -> tuple[torch.nn.Module, int, int]:
    """Return the model, its vocabulary size and its sequence length."""
    torch.manual_seed(0)
    if name == "hf":
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 4096, "n_positions": 64}
        config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        return GPT2LMHeadModel(config), 4096, tokens or 64
    form = MODELS[name].form
    return build_model(name, form, ModelOptions(dropout=0.0)), form.vocabulary, tokens or form.shape[0]


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    with paceline.init("gloo", "cpu", announce=None) as world:
        vocabulary = 0

        def make(kind: str, cap: float | None) -> DDP:
            nonlocal vocabulary
            module, vocabulary, _ = build(asked.model, asked.tokens)
            return DDP(module, embeddings=kind, bucket_cap_mb=cap, check_replicas_every=0)

        length = build(asked.model, asked.tokens)[2]
        models = {(kind, cap): make(kind, cap) for kind in ("dense", "rows") for cap in (None, *asked.caps)}
        draw = torch.Generator().manual_seed(world.rank)
        # As in text, token frequencies follow a Zipf distribution.
        weights = 1 / torch.arange(1, vocabulary + 1)

        def step(model: DDP, is_synchronized: bool = True) -> float:
            ids = torch.multinomial(weights, asked.batch_size * length, True, generator=draw).view(-1, length)
            model.zero_grad()
            dist.barrier()
            begin_s = time.perf_counter()
            model.do_sync = is_synchronized
            out = model(ids)
            logits = getattr(out, "logits", out)
            F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
            return time.perf_counter() - begin_s

        def run(labels: list[Any], rounds: int) -> dict[Any, list[float]]:
            times: dict[Any, list[float]] = {label: [] for label in labels}
            for number in range(rounds + WARMUP):
                for label in labels[number % len(labels) :] + labels[: number % len(labels)]:
                    took_s = step(models["dense", None] if label == "alone" else models[label], label != "alone")
                    if number >= WARMUP:
                        times[label].append(took_s)
            # The slowest rank determines the time of a step.
            return {label: [max(row) for row in zip(*world.share(mine), strict=True)] for label, mine in times.items()}

        first = run(list(models), max(4, asked.rounds // 5))
        best = {}
        for kind in ("dense", "rows"):
            tried = {cap: statistics.median(first[kind, cap]) for cap in asked.caps}
            best[kind] = min(tried, key=tried.__getitem__)
        labels = [*(("dense", None), ("rows", None)), *((kind, best[kind]) for kind in best), "alone"]
        times = run(labels, asked.rounds)
        alone_s = statistics.median(times["alone"])
        rows = []
        for label in labels[:-1]:
            plain = ("dense", None if label[1] is None else best["dense"])
            ratio = compare_times(times[label], times[plain])
            exposed, was = (
                [with_s - without_s for with_s, without_s in zip(times[one], times["alone"], strict=True)]
                for one in (label, plain)
            )
            share = compare_times(exposed, was)
            rows.append({
                "embeddings": label[0], "cap_mb": label[1], "step_s": statistics.median(times[label]),
                "exposed_s": statistics.median(exposed), "of_dense_step": ratio.value, "half_width": ratio.noise,
                "of_dense_exposed": share.value, "exposed_half_width": share.noise,
                "report": str(models[label].report()),
            })  # fmt: skip
        return {"alone_s": alone_s, "rows": rows, "rank": world.rank, "settings": vars(asked) | {"json": None}}


def run_rank(asked: argparse.Namespace) -> None:
    found = measure(asked)
    if found["rank"]:
        return
    print(f"{asked.model}, batch size {asked.batch_size}, 2 ranks, {asked.rate}; alone {found['alone_s'] * 1e3:.1f} ms")
    for row in found["rows"]:
        cap = "default plan" if row["cap_mb"] is None else f"cap {row['cap_mb']} MiB"
        ratio = f"{row['of_dense_step']:.3f} ± {row['half_width']:.3f}"
        share = f"{row['of_dense_exposed']:.2f} ± {row['exposed_half_width']:.2f}"
        print(
            f"{row['embeddings']:6} {cap:14} step {row['step_s'] * 1e3:7.1f} ms ({ratio} of dense), exposed "
            f"{row['exposed_s'] * 1e3:7.1f} ms ({share} of dense)"
        )
    print(found["rows"][-1]["report"])
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1, default=str) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--model", default="gpt2-mini")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=0, help="tokens per sequence; 0: the model's context")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--caps", type=float, nargs="+", default=[0.5, 1, 2, 4, 8, 1000], help="in MiB")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--is-rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not asked.is_rank:
        run_again(asked.rate)
    torch.set_num_threads(1)
    run_rank(asked)


if __name__ == "__main__":
    main()
