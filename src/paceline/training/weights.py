"""The weights of a model by name: without a wrapper's prefix, tied tensors once, and comparable with another model's.

Optimizer state and everything else that a run needs to go on does not belong here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch

from paceline.errors import ConfigError, RecordError
from paceline.records.store import write_new
from paceline.training.tensorfiles import TensorBuffer

__all__ = ["check_fingerprint", "export_weights", "fingerprint", "plain_names", "split_tied"]

# What wrappers for data parallelism and torch.compile put before every name.
_PREFIXES = ("module.", "_orig_mod.")
_SHOWN = 3


def plain_names(model_state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state under the names that the bare model has. A prefix goes only where every name has it."""
    state = dict(model_state)
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"{name!r} in the model's state is a {type(tensor).__name__}: weights are tensors")
    while prefix := next((p for p in _PREFIXES if state and all(name.startswith(p) for name in state)), ""):
        state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state


def split_tied(model_state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The state with each tensor once, under its first name, and for each other name of a tensor that first name."""
    kept: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[tuple[object, ...], str] = {}
    for name, tensor in model_state.items():
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and place in names:
            aliases[name] = names[place]
        else:
            names[place] = name
            kept[name] = tensor
    return kept, aliases


def fingerprint(model_state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Type and shape of each tensor by plain name: equal for models that can take each other's weights."""
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        for name, tensor in plain_names(model_state).items()
    }


def check_fingerprint(found: Mapping[str, str], expected: Mapping[str, str], where: str) -> None:
    """Refuse weights of another model; the error names the first differences."""
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    other = [
        f"{name} is {found[name]} and should be {expected[name]}"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    parts = [
        f"{len(names)} {what} ({', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''})"
        for what, names in (("missing", missing), ("extra", extra), ("of another type or shape", other))
        if names
    ]
    if parts:
        raise ConfigError(
            f"{where} is of another model: of {len(expected)} tensors {'; '.join(parts)}: "
            "train the model that it was saved from, or choose another folder"
        )


def export_weights(path: str | Path, model_state: Mapping[str, torch.Tensor]) -> None:
    """Write the weights as one safetensors file under plain names; refuses to overwrite.

    A tied tensor is stored once, its other names are in the file's metadata: `safetensors.torch.load_model` ties them.
    """
    path = Path(path)
    if path.exists():  # before the copy; `write_new` would find it out after
        raise RecordError(f"{path} exists and is never overwritten: choose another name")
    kept, aliases = split_tied(plain_names(model_state))
    buffer = TensorBuffer()
    content = buffer.fill(kept, {**aliases, "format": "pt"})
    buffer.synchronize()
    write_new(path, cast(bytes, content))
