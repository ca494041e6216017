"""Messages between ranks: every plain value and record survives, and no bytes run code."""

import collections
import dataclasses
import functools
import os
import pickle
import random
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import CollectiveError, ConfigError, LaunchError
from paceline.measure.engine import Timing
from paceline.parallel.control import Finding
from paceline.records.kinds import CollectiveRecord
from paceline.runtime.faults.processes import Failure
from paceline.runtime.ranks import messages

keys = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner), st.dictionaries(keys, inner), st.lists(inner).map(tuple), st.sets(st.integers()),
        st.frozensets(st.text()),
    ),
    max_leaves=12,
)  # fmt: skip


@given(values)
def test_a_value_comes_back_as_it_was(value):
    found = messages.decode(messages.encode(value))
    assert found == value and type(found) is type(value)


RECORDS = [
    Timing([0.5], [1.5], 1, 0, 4),
    Finding("lost", False, "", (1, 2), ()),
    Failure(1, 2.0, "failed", "trace", None, True, "code"),
    Path("/some/where"),
    torch.float16,
    float("inf"),
    {"$": 1, 2: "b"},
    1 + 2j,
]


@pytest.mark.parametrize("value", RECORDS, ids=lambda value: type(value).__name__)
def test_records_and_types_come_back_as_they_were(value):
    found = messages.decode(messages.encode([value]))
    assert found == [value] and type(found[0]) is type(value)


def test_tensors_arrays_and_what_is_derived_from_plain_types():
    tensors = [torch.randn(3, 2).bfloat16(), torch.tensor(True), torch.empty(0, 4), torch.randn(4, 4).t()]
    tensors += [torch.nn.Parameter(torch.ones(2)), torch.randn(2, dtype=torch.complex64)]
    for tensor, found in zip(tensors, messages.decode(messages.encode(tensors)), strict=True):
        assert found.dtype == tensor.dtype and found.shape == tensor.shape and torch.equal(found, tensor.detach())
    array = numpy.arange(6, dtype=numpy.int16).reshape(2, 3)[:, ::2]
    found, number, ordered = messages.decode(
        messages.encode([array, numpy.float32(0.5), collections.OrderedDict(a=torch.Size([2, 3]))])
    )
    assert found.dtype == array.dtype and (found == array).all() and number == 0.5 and ordered == {"a": (2, 3)}


def test_a_record_that_is_made_later_and_an_error_with_its_notes():
    make = functools.partial(CollectiveRecord, collective="all_reduce", world_size=2)
    found = messages.decode(messages.encode(make))
    assert found.func is CollectiveRecord and found.keywords == make.keywords
    error = LaunchError("rank 1 failed", 1, "its traceback", "peer-lost")
    error.add_note("(on rank 1 of 2)")
    found = messages.decode(messages.encode(error))
    assert isinstance(found, LaunchError) and (str(found), found.rank, found.code) == (str(error), 1, "peer-lost")
    assert found.rank_traceback == "its traceback" and found.__notes__ == error.__notes__


@dataclasses.dataclass
class Mine:
    """Not of Paceline."""

    number: int = 0


@pytest.mark.parametrize(
    "value", [Mine(), object(), print, numpy.longdouble(1), torch.nn.Linear(1, 1), torch.eye(2).to_sparse()]
)
def test_what_is_no_plain_value_is_refused_by_its_type(value):
    with pytest.raises(ConfigError, match=r"cannot be saved or sent.*bytes"):
        messages.encode({"deep": [value]})
    loop: list = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="is nested more than"):
        messages.encode(loop)


class Evil:
    def __reduce__(self):
        return os.putenv, ("PACELINE_OWNED", "1")


def test_no_bytes_run_code_or_build_anything_else_than_records():
    whole = messages.encode({"a": (1, torch.ones(3)), "b": Timing()})
    draw, refused = random.Random(7), 0
    bad = [pickle.dumps(Evil()), b"", whole[:-1], whole + b"x", b"[" * 100_000]
    names = (
        "os:system",
        "paceline.runtime.ranks.messages:_find",
        "paceline.errors:refuse",
        "builtins:eval",
        "torch:load",
    )
    for name in names:
        text = b'{"$record": ["%s", {}]}' % name.encode()
        bad.append(messages._HEAD.pack(2, len(text)) + b"[]" + text)
    text = b"[" * 100_000
    bad.append(messages._HEAD.pack(2, len(text)) + b"[]" + text)
    for data in bad:
        with pytest.raises(CollectiveError):
            messages.decode(data)
    for _ in range(2000):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        try:
            messages.decode(bytes(damaged))
        except CollectiveError:
            refused += 1
    assert refused > 500
