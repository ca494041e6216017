"""Typical training programs without Paceline; each returns its losses and the class of its model.

All compute in float64, so that a different order of additions cannot explain a difference.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 6
Losses = list[float]


def draw(step: int, *shape: int) -> torch.Tensor:
    """A batch unique to this rank and step."""
    seed = 1000 * step + dist.get_rank()
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Net(nn.Module):
    """Every rank starts from different values; the wrapper must make them equal."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


def plain(folder: Path) -> tuple[Losses, str]:
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(draw(step, 3, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # A manual checkpoint, loaded as in torch's tutorial.
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), folder / "model.pt")
    dist.barrier()
    again = DDP(Net())
    again.load_state_dict(torch.load(folder / "model.pt", map_location="cpu", weights_only=True))
    losses.append(again(draw(50, 3, 4)).square().mean().item())
    return losses, type(model).__name__


def mixed(folder: Path) -> tuple[Losses, str]:
    model = DDP(Net(), bucket_cap_mb=1e-4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(draw(step, 3, 4)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses += [loss.item(), norm.item()]
    return losses, type(model).__name__


def accumulated(folder: Path) -> tuple[Losses, str]:
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(3):
            with model.no_sync() if part < 2 else contextlib.nullcontext():
                loss = model(draw(10 * step + part, 3, 4)).square().mean() / 3
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses, type(model).__name__


def gan(folder: Path) -> tuple[Losses, str]:
    generator, critic = DDP(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))), DDP(Net())
    for_g, for_c = (torch.optim.Adam(model.parameters(), 0.02) for model in (generator, critic))
    losses = []
    for step in range(STEPS):
        critic.zero_grad()
        fake = generator(draw(step, 3, 2))
        c_loss = F.softplus(-critic(draw(step + 50, 3, 4))).mean() + F.softplus(critic(fake.detach())).mean()
        c_loss.backward()
        for_c.step()
        generator.zero_grad()
        g_loss = F.softplus(-critic(fake)).mean()
        g_loss.backward()
        for_g.step()
        losses += [c_loss.item(), g_loss.item()]
    return losses, type(generator).__name__


def compiled(folder: Path) -> tuple[Losses, str]:
    torch._dynamo.reset()
    wrapped = DDP(Net())
    model = torch.compile(wrapped, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(draw(step, 3, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, type(wrapped).__name__


def joined(folder: Path) -> tuple[Losses, str]:
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with model.join():
        for step in range(STEPS - 2 * dist.get_rank()):
            optimizer.zero_grad()
            loss = model(draw(step, 3, 4)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return [*losses, sum(param.sum().item() for param in model.parameters())], type(model).__name__


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class GPT(nn.Module):
    """A model with its embedding as the output layer, as in GPT-2."""

    def __init__(self, words: int = 17, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.embed, self.blocks = nn.Embedding(words, width), nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.blocks(self.embed(words)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt(folder: Path) -> tuple[Losses, str]:
    model = DDP(GPT())
    raw, losses, parts = model.module, [], 2
    optimizer = torch.optim.AdamW(raw.parameters(), lr=0.01, betas=(0.9, 0.95), fused=False)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + math.cos(math.pi * step / STEPS)) / 2
        for part in range(parts):
            generator = torch.Generator().manual_seed(1000 * step + 10 * part + dist.get_rank())
            words = torch.randint(17, (2, 6), generator=generator)
            model.require_backward_grad_sync = part == parts - 1
            _, loss = model(words[:, :-1], words[:, 1:])
            (loss / parts).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses, type(model).__name__


def convolutions(folder: Path) -> tuple[Losses, str]:
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    model = DDP(net.to(memory_format=torch.channels_last), gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(draw(step, 4, 3, 8, 8)), torch.arange(4) % 5)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, type(model).__name__


PROGRAMS = {
    program.__name__: program for program in (plain, mixed, accumulated, gan, compiled, joined, gpt, convolutions)
}


# -- with a framework: each is called twice, first to train and save, then to load and continue ------------------------


def accelerate(folder: Path, resumes: bool) -> tuple[Losses, str]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    if resumes:
        accelerator.load_state(str(folder))
    losses = []
    for step in range(4):
        with accelerator.accumulate(model):
            loss = model(draw(step + 20 * resumes, 3, 4)).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    assert accelerator.unwrap_model(model) is net
    assert not any(key.startswith("module.") for key in accelerator.get_state_dict(model))
    if not resumes:
        accelerator.save_state(str(folder))
    return losses, type(model).__name__


def _tiny_language_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(dist.get_rank())
    sizes = {"vocab_size": 17, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).double()


def transformers(folder: Path, resumes: bool, **more: Any) -> tuple[Losses, str]:
    from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

    losses = []

    class Noting(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            found = super().compute_loss(*args, **kwargs)
            losses.append((found[0] if isinstance(found, tuple) else found).item())
            return found

    words = torch.randint(17, (64, 8), generator=torch.Generator().manual_seed(5))
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), use_cpu=True, max_steps=4, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, learning_rate=0.01, save_steps=2, report_to=[], disable_tqdm=True,
        logging_steps=1, seed=7, data_seed=7, **more,
    )  # fmt: skip
    trainer = Noting(_tiny_language_model(), arguments, train_dataset=[{"input_ids": w, "labels": w} for w in words])
    trainer.train(resume_from_checkpoint=str(folder / "trainer" / "checkpoint-2") if resumes else None)
    kind = type(getattr(trainer.model_wrapped, "_orig_mod", trainer.model_wrapped)).__name__  # perhaps compiled
    if not resumes:
        trainer.save_model(str(folder / "saved"))
        dist.barrier()
        loaded = GPT2LMHeadModel.from_pretrained(folder / "saved", dtype=torch.float64)
        for saved, trained in zip(loaded.parameters(), trainer.model.parameters(), strict=True):
            assert torch.equal(saved, trained)
    return losses, kind


def _loader() -> torch.utils.data.DataLoader:
    """A loader of this rank's batches."""
    return torch.utils.data.DataLoader([draw(step, 4) for step in range(16)], batch_size=2)


@functools.cache
def _lightning_modules() -> tuple[type, type]:
    import lightning as L

    class Automatic(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses, self.kind = Net(), [], ""

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            loss = self.net(batch).square().mean()
            self.losses.append(loss.item())
            self.kind = type(self.trainer.strategy.model).__name__
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    class Manual(Automatic):
        """Each step trains one of three networks; every third step uses neither the first nor the last parameter."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.nets = nn.ModuleList([self.net, Net(), Net()])

        def training_step(self, batch: torch.Tensor, number: int) -> None:
            optimizer = self.optimizers()[(number + 1) % 3]
            loss = self.nets[(number + 1) % 3](batch).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.losses.append(loss.item())
            self.kind = type(self.trainer.strategy.model).__name__

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD(net.parameters(), lr=0.1) for net in self.nets]

    return Automatic, Manual


def lightning(folder: Path, resumes: bool, is_manual: bool = False, **options: Any) -> tuple[Losses, str]:
    import lightning as L

    torch.manual_seed(dist.get_rank())
    model = _lightning_modules()[is_manual]()
    trainer = L.Trainer(
        accelerator="cpu", devices=dist.get_world_size(), logger=False, enable_progress_bar=False, barebones=False,
        enable_model_summary=False, enable_checkpointing=False, use_distributed_sampler=False,
        max_steps=(8 if resumes else 4), default_root_dir=folder, num_sanity_val_steps=0,
        **{"strategy": "ddp", "accumulate_grad_batches": 1 if is_manual else 2, **options},
    )  # fmt: skip
    trainer.fit(model, _loader(), ckpt_path=str(folder / "model.ckpt") if resumes else None)
    if not resumes:
        trainer.save_checkpoint(folder / "model.ckpt")
        keys = torch.load(folder / "model.ckpt", weights_only=False)["state_dict"]
        assert not any(key.startswith("module.") for key in keys)
    return model.losses, model.kind


def fabric(folder: Path, resumes: bool) -> tuple[Losses, str]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    state = {"model": model, "optimizer": optimizer}
    if resumes:
        fabric.load(folder / "fabric.ckpt", state)
    losses = []
    for step in range(6):
        is_accumulating = step % 2 == 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            loss = model(draw(step + 20 * resumes, 3, 4)).square().mean()
            fabric.backward(loss / 2)
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach()).item())
    if not resumes:
        fabric.save(folder / "fabric.ckpt", state)
        keys = torch.load(folder / "fabric.ckpt", weights_only=False)["model"]
        assert not any(key.startswith("module.") for key in keys)
    return losses, type(model._forward_module).__name__


FRAMEWORKS = {"accelerate": accelerate, "transformers": transformers, "lightning": lightning, "fabric": fabric}


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
