"""Measure the CPU time of each codec: encoding and decoding one bucket on one of two ranks.

    python benchmarks/codec_cost.py [--elements 10485760] [--rounds 7] [--torch]

`--torch` bypasses the compiled core. Prints the time to copy the gradients once, then a line per strategy with its
median milliseconds before the first message, after it, and in total.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from paceline.parallel import codecs
from paceline.strategy import Strategy

STRATEGIES = ("bf16", "int8", "int4", "topk:0.01", "topk:0.001", "topk:0.001,dgc", "powersgd:4", "powersgd:2")
WIDTH = 2048


def time_rounds(text: str, num_elements: int, rounds: int) -> tuple[float, float]:
    """Measure the first rank's milliseconds before and after its first message."""
    strategy = Strategy.parse(text)
    ranks = [codecs.build_codec(strategy, rank, 2) for rank in range(2)]
    shapes = [(WIDTH, WIDTH)] * (num_elements // WIDTH**2) + [(num_elements % WIDTH**2 // WIDTH, WIDTH), (WIDTH,)]
    names = [str(index) for index in range(len(shapes))]
    source = [[torch.randn(shape) for shape in shapes] for _ in ranks]
    grads = [[torch.empty(shape) for shape in shapes] for _ in ranks]
    encode_s, decode_s = [], []
    for step in range(rounds + 2):
        for made, given in zip(grads, source, strict=True):
            torch._foreach_copy_(made, given)
        watched = [0.0, 0.0]
        exchanges = [codec.average(names, mine, step) for codec, mine in zip(ranks, grads, strict=True)]
        codecs.run_together([_watch(exchanges[0], watched), exchanges[1]])
        encode_s.append(watched[0])
        decode_s.append(watched[1])
    return statistics.median(encode_s[2:]) * 1e3, statistics.median(decode_s[2:]) * 1e3


def _watch(exchange: codecs.Exchange, spent: list[float]) -> codecs.Exchange:
    value, part = None, 0
    while True:
        begin_s = time.thread_time()
        try:
            message = exchange.send(value)  # type: ignore[arg-type]
        except StopIteration:
            return
        finally:
            spent[part] += time.thread_time() - begin_s
        value, part = (yield message), 1


def time_call(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begin_s = time.thread_time()
        call()
        times.append(time.thread_time() - begin_s)
    return statistics.median(times) * 1e3


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=10 << 20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--torch", action="store_true", help="do not use the compiled core")
    parser.add_argument("--strategy", nargs="*", default=STRATEGIES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.torch:
        codecs._library = lambda: None  # type: ignore[assignment]
    one, other = torch.ones(options.elements), torch.empty(options.elements)
    print(f"copy {time_call(lambda: other.copy_(one), options.rounds):8.1f} ms for {options.elements} elements")
    for text in options.strategy:
        encode_ms, decode_ms = time_rounds(text, options.elements, options.rounds)
        print(f"{text:16} {encode_ms:8.1f} {decode_ms:8.1f} {encode_ms + decode_ms:8.1f}", flush=True)
