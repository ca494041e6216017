"""Parts of gradients for the ranks of a host: splitting, joining, and the traffic of two levels."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.errors import ConfigError
from paceline.parallel.levels import Levels
from paceline.plan import Gradient
from paceline.strategy import Message, Strategy

SHAPES = {"": (), "a": (7,), "b": (3, 3), "c": (4, 50), "d": (8, 4, 3, 3), "e": (0, 4), "f": (9, 2), "g": (4,)}


def place(text: str, num_hosts: int, per_host: int, rank: int) -> Levels:
    hosts = tuple(tuple(range(host * per_host, (host + 1) * per_host)) for host in range(num_hosts))
    return Levels(Strategy.parse(text), hosts, rank, True)


@pytest.mark.parametrize("text", ["int8+hosts", "powersgd:2+hosts"])
@pytest.mark.parametrize("per_host", [1, 2, 3, 8])
def test_the_parts_of_a_host_add_up_to_the_whole(text, per_host):
    torch.manual_seed(3)
    shapes = {name: torch.Size(shape) for name, shape in SHAPES.items()}
    whole = {f"momentum {name}" if name == "a" else name: torch.randn(shape) for name, shape in shapes.items()}
    parts = [place(text, 2, per_host, rank).cut(whole, shapes) for rank in range(2 * per_host)]
    for name, shape in shapes.items():
        cut, _ = Strategy.parse(text).cut(shape, per_host)
        assert {part[f"momentum {name}" if name == "a" else name].numel() for part in parts} == {math.prod(cut)}
    for part in parts[per_host:]:  # twice as much on the other host; missing entries are zero
        for value in part.values():
            value.mul_(2)
        del part["g"]
    joined = place(text, 2, per_host, 0).join(parts, shapes)
    for name, value in whole.items():
        torch.testing.assert_close(joined[name], value * (0.5 if name == "g" else 1.5))


def test_state_of_another_model_is_refused_by_name():
    levels, shapes = place("int8+hosts", 2, 2, 0), {"a": torch.Size((4,))}
    for parts in ({"b": torch.zeros(2)}, {"a": torch.zeros(3)}):
        with pytest.raises(ConfigError, match=next(iter(parts))) as caught:
            levels.join([parts] * 4, shapes)
        assert caught.value.code == "strategy"


def test_messages_of_both_levels():
    matrix, vector = Gradient("matrix", 4 * 100 * 30, shape=(100, 30)), Gradient("vector", 4 * 7, shape=(7,))
    for text, between in {
        "hosts": [("all-reduce", 4 * (1500 + 4))],
        "bf16+hosts": [("all-to-all", 3 * 1004), ("all-gather", 1004)],
        # 1504 numbers in two blocks for each of three hosts, at 256 bytes and a scale per block.
        "int8+hosts": [("all-to-all", 3 * 2 * 260), ("all-gather", 2 * 260)],
        "topk:0.01+hosts": [("all-gather", 8 * 15 + 4 * 4)],
        # Two matrices of 50 x 30 and a vector that is sent uncompressed.
        "powersgd:4+hosts": [("all-reduce", 4 * (50 * 4 + 4)), ("all-reduce", 4 * 30 * 4)],
    }.items():
        first, *middle, last = Strategy.parse(text).traffic([matrix, vector], 6, 2)
        assert first == Message("reduce-scatter", 2 * 4 * 1504, 2, True) and last == Message(
            "all-gather", 4 * 1504, 2, True
        )
        assert [(m.kind, m.ranks, m.is_inside) for m in middle] == [(kind, 3, False) for kind, _ in between], text
        assert [m.num_bytes for m in middle] == [size for _, size in between], text
    # Each part is split along its longer side.
    wide = Gradient("wide", 4 * 30 * 100, shape=(30, 100))
    assert Strategy.parse("powersgd:4+hosts").traffic([wide], 4, 2)[1:3] == (
        Message("all-reduce", 4 * 50 * 4, 2), Message("all-reduce", 4 * 30 * 4, 2),
    )  # fmt: skip
    assert first.sent_bytes(6) == 4 * 1504 and last.as_all_reduce(6) == 4 * 1504


def test_with_one_level_the_messages_are_those_of_the_plain_strategy():
    gradients, strategy = [Gradient("a", 4000, shape=(100, 10))], Strategy.parse("int8+hosts")
    assert strategy.traffic(gradients, 4) == Strategy.parse("int8").traffic(gradients, 4)
    assert strategy.traffic(gradients, 4, 4) == strategy.traffic(gradients, 4, 8) == (Message("all-reduce", 4000),)
    assert strategy.count_sent_bytes(gradients, 4, 2) == sum(
        message.sent_bytes(4) for message in strategy.traffic(gradients, 4, 2)
    )
    with pytest.raises(ConfigError, match=r"6 ranks .*hosts of 4"):
        strategy.traffic(gradients, 6, 4)
