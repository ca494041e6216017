"""Embedding gradients sent as rows equal those of torch's wrapper, however the model uses the weight."""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.parallel import DDP
from tests.dist.wrapped import check_equal, error_of, here

# 256 KiB: the smallest table for which rows pay off.
ROWS, WIDTH = 2048, 32
# A separate bucket for the head: with a single bucket, a tied table is sent whole.
SMALL_BUCKETS = 0.1


class Words(nn.Module):
    """An embedding, a layer and a head. Each option varies one thing that models do differently."""

    def __init__(self, tied: str = "", tables: int = 1, heads: int = 1, num_rows: int = ROWS, **options: Any) -> None:
        super().__init__()
        self.words = nn.ModuleList(nn.Embedding(num_rows, WIDTH, **options) for _ in range(tables))
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, num_rows, bias=False) for _ in range(heads))
        self.tied = tied
        for head in self.heads if tied == "parameter" else ():
            head.weight = self.words[0].weight
        if tied == "functional":
            self.heads = nn.ModuleList()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = sum(table(ids) for table in self.words)
        x *= 2.0  # in place, as many models scale it
        x = torch.tanh(self.inner(x))
        if self.tied == "functional":
            return F.linear(x, self.words[0].weight)
        return sum(head(x) for head in self.heads)  # type: ignore[return-value]


class Bag(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(ROWS, WIDTH, **options), nn.Linear(WIDTH, ROWS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids))[:, None].expand(-1, ids.shape[1], -1)


class Twice(Words):
    """The table is looked up twice, once in a checkpointed segment."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        again = checkpoint(lambda tokens: torch.tanh(self.words[0](tokens)), ids.flip(0), use_reentrant=False)
        return self.heads[0](torch.tanh(self.inner(self.words[0](ids) + again)))


def freeze(model: Words) -> Words:
    model.words[0].weight.requires_grad_(False)
    return model


def build_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "vocab_size": ROWS, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def build_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=ROWS, max_position_embeddings=16, tie_word_embeddings=True))


HUGGING_FACE: dict[str, Callable[[], nn.Module]] = {"gpt2": build_gpt2, "llama": build_llama}
# How each table is sent, according to the report.
MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "untied": (Words, "sends rows"),
    "tied": (functools.partial(Words, "parameter"), "in the buckets"),
    "functional head": (functools.partial(Words, "functional"), "in the buckets"),
    "two heads": (functools.partial(Words, "parameter", heads=2), "in the buckets"),
    "two tables": (functools.partial(Words, tables=2), "sends rows"),
    "padding": (functools.partial(Words, padding_idx=3), "sends rows"),
    "sparse": (functools.partial(Words, sparse=True), "sends rows"),
    "sparse and tied": (functools.partial(Words, "parameter", sparse=True), "sent whole: sparse=True"),
    "frozen": (lambda: freeze(Words()), ""),
    "bag": (Bag, "sends rows"),
    "bag of means, sparse": (functools.partial(Bag, mode="mean", sparse=True), "sends rows"),
    "two lookups": (Twice, "sends rows"),
    "max_norm": (functools.partial(Words, max_norm=1.0), "sent whole: max_norm"),
    "scaled by frequency": (functools.partial(Words, scale_grad_by_freq=True), "sent whole: scale_grad_by_freq"),
    "bag of maxima": (functools.partial(Bag, mode="max"), "sent whole: mode 'max'"),
}


def draw_ids(rank: int, step: int, size: tuple[int, int] = (3, 8), num_rows: int = ROWS) -> torch.Tensor:
    return torch.randint(0, num_rows, size, generator=torch.Generator().manual_seed(100 * step + rank)).to(here())


def measure(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    out = model(ids)
    logits = getattr(out, "logits", out).flatten(0, 1)
    return F.cross_entropy(logits, ids.flatten(), reduction="sum") / max(1, ids.numel())


def to_dense(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else grad.to_dense()


def compare(world: Any, name: str, build: Callable[[], nn.Module], ids_of: Any = draw_ids, **options: Any) -> DDP:
    """Run both wrappers on the same batches. Collective."""
    torch.manual_seed(world.rank)
    # torch's wrapper fails if a weight with sparse gradients is also used elsewhere.
    plain = MODELS["tied"][0] if name == "sparse and tied" else build
    # `max_norm` changes each rank's parameters in forward, depending on its tokens.
    ours = DDP(build(), check_replicas_every=0, **options)
    theirs = DistributedDataParallel(plain())
    theirs.module.load_state_dict(ours.module.state_dict())
    for step in range(4):
        ids = ids_of(world.rank, step)
        for model in (ours, theirs):
            model.zero_grad()
            measure(model, ids).backward()
        pairs = zip(ours.module.named_parameters(), theirs.module.parameters(), strict=True)
        for (param, mine), other in pairs:
            torch.testing.assert_close(
                to_dense(mine.grad), to_dense(other.grad), msg=lambda text, p=param, s=step: f"{name}, {s}, {p}: {text}"
            )
            assert mine.grad is None or mine.grad.layout == other.grad.layout, f"{name}: {param} is {mine.grad.layout}"
        check_equal(world, [to_dense(param.grad) for param in ours.module.parameters()], name)
    return ours


def compare_all(names: list[str], how: str = "auto") -> None:
    with paceline.init(backend="gloo", announce=None) as world:
        for name in names:
            build, wanted = MODELS[name] if name in MODELS else (HUGGING_FACE[name], "in the buckets")
            report = "; ".join(
                compare(world, name, build, bucket_cap_mb=SMALL_BUCKETS, embeddings=how).report().embeddings
            )
            assert wanted in report, f"{name}: {report}"


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["untied", "tied", "sparse"], id="common"),
        pytest.param(
            [name for name in MODELS if name not in ("untied", "tied", "sparse")], id="rare", marks=pytest.mark.slow
        ),
    ],
)
def test_gradients_are_those_of_torch(job, names):
    job(2, compare_all, names)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_tied_models_of_hugging_face_are_split(job):
    job(2, compare_all, list(HUGGING_FACE))


def draw_unevenly(rank: int, step: int) -> torch.Tensor:
    """In some steps one rank has no tokens, in another no rank has any, and in another all have more than the table
    has rows."""
    sizes = {1: (0, 8) if rank else (3, 8), 2: (0, 8), 3: (ROWS // 4, 8)}
    return draw_ids(rank, step, sizes.get(step, (3, 8)))


def draw_many(rank: int, step: int) -> torch.Tensor:
    return draw_ids(rank, step, (ROWS // 4, 8))


def compare_sizes(name: str) -> None:
    with paceline.init(backend="gloo", announce=None) as world:
        build = MODELS[name][0]
        compare(world, f"{name}, uneven", build, draw_unevenly, embeddings="rows")
        many = compare(world, f"{name}, more tokens than rows", build, draw_many, bucket_cap_mb=SMALL_BUCKETS)
        report = many.report()
        assert "is sent whole: up to" in report.embeddings[0]
        assert report.plan.partition[-1][-1] == 0, "it is ready last"
        report = compare(world, f"{name}, off", build, embeddings="dense").report()
        assert report.embeddings[0].endswith("embeddings='dense'") and not report.plan.rows


@pytest.mark.parametrize("name", ["untied", pytest.param("tied", marks=pytest.mark.slow)])
def test_ranks_without_tokens_and_with_many(job, name):
    job(2, compare_sizes, name)


def send_one_bucket() -> None:
    with paceline.init(backend="gloo", announce=None) as world:
        for how, name, wanted in (
            ("auto", "tied", "is sent whole: the bucket with its dense part"),
            ("rows", "tied", "in the buckets"),
            ("auto", "untied", "sends rows"),
        ):
            model = compare(world, f"{how}, {name}", MODELS[name][0], embeddings=how)
            report = model.report()
            assert len(report.plan.buckets) == 1 and bool(report.plan.rows) == ("whole" not in wanted)
            assert wanted in report.embeddings[0], report.embeddings
            again = DDP(MODELS[name][0](), plan=model.plan)  # `plan` determines the messages
            for step in range(2):
                measure(again, draw_ids(world.rank, step)).backward()
            assert again.plan == model.plan and wanted in again.report().embeddings[0]


def test_with_one_bucket_the_rows_of_a_tied_table_must_be_requested(job):
    job(2, send_one_bucket)


def share_memory() -> None:
    with paceline.init(backend="shm", announce=None) as world:
        for how, wanted in (("auto", "is sent whole: ranks share memory"), ("rows", "in the buckets")):
            report = compare(world, how, MODELS["tied"][0], embeddings=how).report()
            assert wanted in report.embeddings[0], report.embeddings


def test_between_ranks_that_share_memory_rows_must_be_requested(job):
    job(2, share_memory)


def train_in_other_ways() -> None:
    with paceline.init(backend="gloo", announce=None) as world:
        for name in ("untied", "tied", "sparse"):
            model = DDP(MODELS[name][0](), embeddings="rows")
            alone = copy.deepcopy(model.module)
            for step in range(4):
                # Three micro-batches; gradients are zeroed in place in step 2, and never in step 3.
                for one in (model, alone):
                    if step != 3:
                        one.zero_grad(set_to_none=step != 2)
                for micro in range(3):
                    model.do_sync = micro == 2
                    measure(model, draw_ids(world.rank, 10 * step + micro)).backward()
                    for rank in range(world.world_size):
                        (measure(alone, draw_ids(rank, 10 * step + micro)) / world.world_size).backward()
                pairs = zip(model.module.named_parameters(), alone.parameters(), strict=True)
                for (param, mine), other in pairs:
                    text = f"{name}, {step}, {param}"
                    torch.testing.assert_close(
                        to_dense(mine.grad), to_dense(other.grad), msg=lambda t, s=text: f"{s}: {t}"
                    )
        model = DDP(Words("parameter"), embeddings="rows")
        for _ in range(2):
            measure(model, draw_ids(world.rank, 0)).backward()
        loss = measure(model, draw_ids(world.rank, 0))
        kind, text = error_of(lambda: torch.autograd.grad(loss, [model.module.words[0].weight]))
        assert kind == "ConfigError autograd-grad", text
        copied = copy.deepcopy(model)  # the copy's hooks are separate
        measure(copied, draw_ids(world.rank, 0)).backward()
        assert not model.module.words[0].__dict__.get("weight"), "the alias is gone after forward"


def test_accumulation_and_corners(job):
    job(2, train_in_other_ways)
