"""Notices parameters that are added to, or set to be trained in, a module that is already wrapped.

Walking a model takes longer than a step may spend on it: so registrations are counted where torch makes them, and
only a changed count, or a changed `requires_grad` of a frozen parameter, leads to a walk.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from paceline.parallel.replicas import Members, find_members

__all__ = ["StructureWatch"]

_LISTED = 5
_registrations = 0
_is_trained = operator.attrgetter("requires_grad")


def _count(*_: object) -> None:
    global _registrations
    _registrations += 1


_is_counting = False


class StructureWatch:
    """Compares a module with its members at the time of wrapping."""

    def __init__(self, members: Members, ignored: Collection[str]) -> None:
        global _is_counting
        if not _is_counting:
            register_module_parameter_registration_hook(_count)
            register_module_module_registration_hook(_count)
            _is_counting = True
        self._members, self._ignored = members, ignored
        self._seen = _registrations

    def find_change(self, module: nn.Module) -> str:
        """In words what has changed so that gradients would not be synchronised, or nothing."""
        frozen = self._members.frozen
        if self._seen == _registrations and not (frozen and any(map(_is_trained, frozen))):
            return ""
        self._seen = _registrations
        found = find_members(module, [name for name in self._ignored if _has(module, name)])
        known = {id(param) for param in self._members.params}
        new = [names[0] for names, param in zip(found.names, found.params, strict=True) if id(param) not in known]
        if not new:
            return ""
        was_frozen = set(self._members.frozen_names)
        more = f" and {len(new) - _LISTED} more" if len(new) > _LISTED else ""
        listed = [f"{name} was frozen and is now trained" if name in was_frozen else f"{name} is new" for name in new]
        self._seen = -1  # look again, until the module is wrapped anew
        return ", ".join(listed[:_LISTED]) + more


def _has(module: nn.Module, name: str) -> bool:
    return any(
        name == known for known, _ in [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    )
