"""The coarse blocks of a module, as a person would draw them: stem, repeated layers, head.

What is done with a block, such as timing or compiling it, does not belong here.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

__all__ = ["assign_parameters", "find_blocks"]


def find_blocks(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks in the order of definition, by name; each can be called, holds parameters, and is there once.

    A module that holds a stack (several layers that have parts of their own, in a list or in sequence) is taken apart;
    the layers of a stack are blocks. What has no parameters, such as an activation, is none,
    unless it is all there is.
    """
    prefix = ""
    # A module that only holds another, as a wrapper does, says nothing about its blocks.
    while len(inner := _trained_children(module)) == 1 and not _owns_parameters(module):
        name, module = inner[0]
        prefix += f"{name}."
    seen: set[int] = set()
    blocks = []
    for name, block in list(_walk(module)) or [("", module)]:
        if id(block) not in seen:
            seen.add(id(block))
            blocks.append(((prefix + name).rstrip("."), block))
    return blocks


def assign_parameters(module: nn.Module) -> dict[str, str]:
    """The name of the block that each parameter belongs to, for all names of `named_parameters()`.

    A tied parameter belongs to the first block that has it. One that a module above the blocks owns itself belongs to
    the first block in that module.
    """
    blocks = find_blocks(module)
    owners: dict[int, str] = {}
    for name, block in blocks:
        for parameter in block.parameters():
            owners.setdefault(id(parameter), name)
    assigned = {}
    for name, parameter in module.named_parameters():
        owner = owners.get(id(parameter))
        if owner is None:
            above = name.rpartition(".")[0]
            inside = [block for block, _ in blocks if not above or block == above or block.startswith(f"{above}.")]
            owner = (inside or [blocks[0][0]])[0]
        assigned[name] = owner
    return assigned


def _walk(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    children = _trained_children(module)
    classes = [type(child) for _, child in children]
    for name, child in children:
        # Part of a list, or one of several alike: a layer whatever it holds (a mixture of experts holds a list).
        alike = classes.count(type(child)) if isinstance(module, nn.Sequential) else 1
        is_layer = not isinstance(child, _LISTS) and (isinstance(module, nn.ModuleList | nn.ModuleDict) or alike > 1)
        if isinstance(child, nn.ModuleList | nn.ModuleDict) or (not is_layer and _holds_stack(child)):
            for inner, block in _walk(child):
                yield f"{name}.{inner}", block
        else:
            yield name, child


_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def _trained_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in module.named_children() if next(child.parameters(), None) is not None]


def _owns_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _holds_stack(module: nn.Module) -> bool:
    """Whether the module is a stack, or has one somewhere inside."""
    return any(
        isinstance(part, _LISTS) and _count_layers(part) > isinstance(part, nn.Sequential) for part in module.modules()
    )


def _count_layers(module: nn.Module) -> int:
    """How many parts of the list have parts of their own."""
    return sum(bool(_trained_children(child)) for _, child in _trained_children(module))
