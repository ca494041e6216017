"""Strategies written as text, rejected strategies, and the bytes that a strategy sends."""

import pytest

from paceline.errors import ConfigError
from paceline.plan import Gradient
from paceline.strategy import Message, Strategy, parse_strategies

MATRIX = Gradient("matrix", 4 * 64 * 32, shape=(64, 32))
VECTOR = Gradient("vector", 4 * 10, shape=(10,))


def test_a_text_says_what_is_sent_when_and_where():
    assert Strategy.parse(None).is_dense and Strategy.parse("dense").is_exact
    dgc = Strategy.parse("topk:0.001, dgc, warmup=400")
    assert (dgc.codec, dgc.amount, dgc.dgc, dgc.warmup, dgc.feedback) == ("topk", 0.001, 0.9, 400, True)
    assert Strategy.parse("topk:0.01,feedback=0").feedback is False
    both = Strategy.parse("diloco:100,lr=0.5,fragments=4,delay=2+int8")
    assert (both.outer, both.period, both.lr, both.momentum) == ("diloco", 100, 0.5, 0.9)
    assert (both.codec, both.fragments, both.delay, both.is_hook, both.is_exact) == ("int8", 4, 2, False, False)
    sharded = Strategy.parse("zero1")
    assert sharded.is_sharded and sharded.is_exact and not sharded.is_hook
    levels = Strategy.parse("hosts")
    assert levels.between_hosts and levels.is_exact and levels.is_hook and not levels.is_dense
    assert Strategy.parse("int8+hosts").codec == "int8" and not Strategy.parse("int8+hosts").is_exact
    assert not Strategy.parse("zero1+bf16").is_exact and Strategy.parse("powersgd:4").is_hook


def test_equal_strategies_have_one_text():
    for one, other in (("bf16+zero1", "zero1+bf16"), ("topk:0.010", "topk:0.01"), ("int8+diloco:8", "diloco:8+int8")):
        assert Strategy.parse(one) == Strategy.parse(other) and Strategy.parse(one).text == other
    assert Strategy(codec="int8").text == "int8" and Strategy().text == "dense"
    assert Strategy.parse("diloco:8,lr=0.7,momentum=0.90").text == "diloco:8"
    third = Strategy.parse(f"topk:{1 / 3!r}")  # as after a resume
    assert Strategy.parse(third.text) == Strategy.parse(third) == third
    for text in (
        "topk:0.001,dgc,warmup=400", "topk:0.1,feedback=0", "topk:0.1,dgc=0.5", "int8,feedback=0+hosts", "hosts",
        "diloco:8,after=3,lr=1,fragments=2,delay=3,mixing=0.25+int4", "slowmo:8,momentum=0", "localsgd:8,after=500",
    ):  # fmt: skip
        assert Strategy.parse(text).text == text
        assert Strategy.parse(Strategy.parse(text).text) == Strategy.parse(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("foo", "'foo' is unknown; use dense"),
        ("int8+bf16", "int8 and bf16 cannot be combined"),
        ("topk", "write topk:NUMBER"),
        ("bf16:3", "write bf16"),
        ("topk:2", "'2' must be a fraction, such as 0.01, from 0 to 1"),
        ("topk:1%", "'1%' must be a fraction, such as 0.01, from 0 to 1"),
        ("powersgd:0", "must be an integer from 1"),
        ("topk:0.1,dgc=1", "a momentum of 1"),
        ("slowmo:8,momentum=1", "a momentum of 1"),
        ("topk:0.1,dgc,feedback=0", "leave one out"),
        ("diloco:8,mixing=0.5", "add delay=STEPS"),
        ("topk:0", "a density above 0"),
        ("powersgd:1.5", "the rank must be an integer"),
        ("topk:0.1,warmup", "write warmup=NUMBER"),
        ("slowmo:8,x=1", "no option 'x'"),
        ("diloco:0", "must be an integer from 1"),
        ("diloco:nan", "must be an integer"),
        ("zero1+int8", "exact sum"),
        ("diloco:10+zero1", "choose one"),
        ("diloco:10+topk:0.1", "use bf16, int8 or int4"),
        ("diloco:4,fragments=9", "more fragments than steps"),
        ("localsgd:8+hosts", "leave out \\+hosts"),
        ("diloco:8+int8+hosts", "leave out \\+hosts"),
        ("zero1+hosts", "shards over all ranks"),
        ("", "'' is unknown"),
        ("diloco:8,lr=0", "above 0"),
        ("int8:", "write int8"),
        ("topk:", "must be a fraction"),
        ("int8,feedback=", "'' must be 0 or 1"),
        ("topk:0.1,dgc,dgc=0.5", "dgc is set twice"),
        (4, "pass a text"),
        (Strategy(codec="int9"), "not a valid combination"),
        (Strategy(codec="topk"), "a density above 0"),
        (Strategy(codec="int8", period=4), "not a valid combination"),
    ],
)
def test_undefined_strategies_are_refused_in_one_line(text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        Strategy.parse(text)
    assert caught.value.code == "strategy" and "\n" not in str(caught.value)


def test_top_k_selects_from_large_vectors_and_unknown_shapes():
    for gradient in (Gradient("long", 4 * 100_000, shape=(100_000,)), Gradient("unknown", 4 * 100_000)):
        (message,) = Strategy.parse("topk:0.01").traffic([gradient], 2)
        assert message.num_bytes == 8 * 1000
        assert Strategy.parse("topk:0.01+hosts").traffic([gradient], 4, 2)[1].num_bytes == 8 * 500


def test_a_list_attaches_options_to_the_preceding_strategy():
    found = parse_strategies("bf16,topk:0.01,dgc,warmup=5,diloco:10,lr=0.5+int8,bf16")
    assert [strategy.text for strategy in found] == ["bf16", "topk:0.01,dgc,warmup=5", "diloco:10,lr=0.5+int8"]
    assert [s.text for s in parse_strategies(["topk:0.1,dgc", "int8"])] == ["topk:0.1,dgc", "int8"]
    with pytest.raises(ConfigError, match="'lr=2'"):
        parse_strategies("lr=2,bf16")


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("dense", [("all-reduce", 8232)]),
        ("bf16", [("all-reduce", 4116)]),
        # 2058 numbers in 5 blocks for each of two ranks, at 256 bytes and a scale per block.
        ("int8", [("all-to-all", 2 * 5 * 260), ("all-gather", 5 * 260)]),
        ("int4", [("all-to-all", 2 * 5 * 132), ("all-gather", 5 * 132)]),
        ("topk:0.01", [("all-gather", 8 * 21 + 4 * 10)]),  # 1 % of the matrix with indices, and the whole vector
        ("powersgd:4", [("all-reduce", 4 * (64 * 4 + 10)), ("all-reduce", 4 * 32 * 4)]),
        ("powersgd:32", [("all-reduce", 8232)]),
    ],
)
def test_the_messages_of_a_bucket_on_two_ranks(text, messages):
    found = Strategy.parse(text).traffic([MATRIX, VECTOR], 2)
    assert [(message.kind, message.num_bytes) for message in found] == messages


def test_bytes_on_the_wire_and_the_equivalent_all_reduce():
    assert [Message(kind, 800).sent_bytes(4) for kind in ("all-reduce", "all-gather", "all-to-all")] == [
        1200,
        2400,
        600,
    ]
    assert [Message(kind, 800).as_all_reduce(4) for kind in ("all-reduce", "all-gather", "all-to-all")] == [
        800,
        1600,
        400,
    ]
    assert Message("all-reduce", 800).sent_bytes(1) == 0
    every = Strategy.parse("dense").count_sent_bytes([MATRIX, VECTOR], 2)
    assert Strategy.parse("localsgd:8").count_sent_bytes([MATRIX, VECTOR], 2) == every / 8 == 8232 / 8


def test_the_bytes_of_a_run_include_the_steps_before_a_schedule_and_those_of_a_warm_up():
    every = Strategy.parse("dense").count_sent_bytes([MATRIX, VECTOR], 2)
    later = Strategy.parse("localsgd:8,after=10")
    assert later.count_sent_bytes([MATRIX, VECTOR], 2) == every / 8
    assert later.count_sent_bytes([MATRIX, VECTOR], 2, num_steps=40) == pytest.approx(
        (10 * every + 30 * every / 8) / 40
    )
    assert later.count_sent_bytes([MATRIX, VECTOR], 2, num_steps=4) == every
    first, last = (Strategy.parse(f"topk:{share}") for share in (0.25, 0.0025))
    warm = Strategy.parse("topk:0.0025,warmup=2")  # the density falls to 0.25, 0.025, 0.0025
    middle = Strategy.parse("topk:0.025").count_sent_bytes([MATRIX], 2)
    sent = [first.count_sent_bytes([MATRIX], 2), middle, *[last.count_sent_bytes([MATRIX], 2)] * 2]
    assert warm.count_sent_bytes([MATRIX], 2, num_steps=4) == pytest.approx(sum(sent) / 4)
