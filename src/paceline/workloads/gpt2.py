"""GPT-2 in plain torch, of any size, as a language model or with a head that tells classes apart.

Sizes by name are in `choose`; models that `transformers` defines are in `huggingface`.
"""

from __future__ import annotations

import math
import re

import torch
import torch.nn.functional as F
from torch import nn

from paceline.errors import ConfigError

__all__ = ["GPT2", "export_state", "import_state"]


class _Attention(nn.Module):
    """Causal self-attention with one matrix for queries, keys and values."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        mixed: torch.Tensor = self.project(y.transpose(1, 2).flatten(2))
        return mixed


class _Block(nn.Module):
    """LayerNorm before attention, LayerNorm before the MLP, each added to what came in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _Attention(width, heads, dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        added: torch.Tensor = self.drop(self.mlp(self.norm2(x)))
        return x + added


class GPT2(nn.Module):
    """GPT-2 (Radford 2019): learned positions, and a head tied to the embedding. No dropout unless asked, so that steps
    repeat. With `num_classes` a linear layer on the last token of each sequence takes the place of the tied head.
    """

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        vocabulary: int = 50257,
        context: int = 1024,
        num_classes: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.classes = nn.Linear(width, num_classes, bias=False) if num_classes else None
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What writes into the residual stream starts smaller, for there are 2 x layers of it.
                into_stream = name.endswith(("project.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if into_stream else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Logits: of every next token, or of the classes.

        The mask is 1 on tokens and 0 on padding, which must be behind them: no token looks ahead, so none sees it.
        """
        length, context = ids.shape[1], self.positions.num_embeddings
        if length > context:
            # On a GPU the lookup itself would fail without a word of where or why.
            raise ConfigError(
                f"a sequence of {length} tokens: this model has {context} positions, use a context of those"
            )
        x = self.drop(self.tokens(ids) + self.positions(torch.arange(length, device=ids.device)))
        for block in self.blocks:
            x = block(x)
        if self.classes is None:
            return F.linear(self.norm(x), self.tokens.weight)
        if attention_mask is None:
            x = x[:, -1]
        else:
            places = torch.arange(length, device=ids.device)
            last = (attention_mask * places).argmax(dim=1)
            x = x[torch.arange(len(x), device=x.device), last]
        logits: torch.Tensor = self.classes(self.norm(x))
        return logits


# Parts of a parameter's name here, and in the files that Hugging Face distributes.
_NAMES = (
    (r"^tokens\.", "wte."),
    (r"^positions\.", "wpe."),
    (r"^blocks\.", "h."),
    (r"^norm\.", "ln_f."),
    (r"\.norm1\.", ".ln_1."),
    (r"\.norm2\.", ".ln_2."),
    (r"\.attention\.qkv\.", ".attn.c_attn."),
    (r"\.attention\.project\.", ".attn.c_proj."),
    (r"\.mlp\.0\.", ".mlp.c_fc."),
    (r"\.mlp\.2\.", ".mlp.c_proj."),
)
_TRANSPOSED = re.compile(r"\.c_(attn|proj|fc)\.weight$")


def _rename(name: str) -> str:
    for here, there in _NAMES:
        name = re.sub(here, there, name)
    return "score.weight" if name == "classes.weight" else f"transformer.{name}"


def export_state(module: GPT2) -> dict[str, torch.Tensor]:
    """The parameters under the names, and with the transposed matrices, of `transformers`' GPT-2."""
    state = {_rename(name): tensor.detach() for name, tensor in module.named_parameters()}
    return {name: tensor.t() if _TRANSPOSED.search(name) else tensor for name, tensor in state.items()}


def import_state(module: GPT2, state: dict[str, torch.Tensor]) -> None:
    """Fill the module from the parameters of `transformers`' GPT-2, with or without their prefix `transformer.`."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            there = _rename(name)
            found = state.get(there, state.get(there.removeprefix("transformer.")))
            if found is not None and _TRANSPOSED.search(there):
                found = found.t()
            if found is None or found.shape != parameter.shape:
                what = "missing" if found is None else f"of shape {tuple(found.shape)}"
                raise ConfigError(f"weight {there} is {what}: this model needs it of shape {tuple(parameter.shape)}")
            parameter.copy_(found)
