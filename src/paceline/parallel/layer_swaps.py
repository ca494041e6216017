"""Layers of a model replaced by others that hold the very same parameters, buffers and hooks.

What the new layers compute is in `batchnorm` and `ghost`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from paceline.errors import ConfigError

__all__ = ["replace_batchnorms"]

Layer = TypeVar("Layer", bound=nn.Module)


def replace_batchnorms(
    module: nn.Module, kind: type[Layer], settle: Callable[[Layer], Any], known: tuple[Callable[..., Any], ...] = ()
) -> nn.Module:
    """Replace every BatchNorm below the module by a `kind`, and return it, or the new layer where it is itself one.

    A layer used twice stays one layer. `settle` sets what a BatchNorm does not have; `known` are further forwards that
    the new layer stands in for. Raises before anything is replaced.
    """
    replaced: dict[nn.Module, Layer] = {}
    for name, layer in module.named_modules():
        if not isinstance(layer, _BatchNorm):
            continue
        where = f"{name or 'the module'} ({type(layer).__name__})"
        if isinstance(layer, LazyModuleMixin):
            raise ConfigError(f"{where} does not know its channels yet: run one batch through it, then convert")
        if not isinstance(layer, kind) and type(layer).forward not in (_BatchNorm.forward, *known):
            raise ConfigError(f"{where} has a forward of its own, which would be lost: replace it by hand")
        new = replaced[layer] = layer if isinstance(layer, kind) else kind.__new__(kind)
        # The very same dicts of parameters, buffers and hooks, so that the handle of a hook still removes it.
        new.__dict__.update(layer.__dict__)
    for new in replaced.values():
        settle(new)
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child in replaced:
                parent._modules[name] = replaced[child]
    return replaced.get(module, module)
