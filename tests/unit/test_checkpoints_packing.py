"""Packing a state into tensors and JSON is lossless; unsupported values are named in the error."""

import collections
import copy
import json
import math
import random
import struct

import pytest
import torch
import torch._dynamo  # optimizers import it, and importing it sets an environment variable; do that before any test

from paceline.errors import ConfigError
from paceline.runtime.ranks.messages import pack, unpack
from paceline.training.checkpoint_files import _INVALID

NAN_WITH_PAYLOAD = struct.unpack(">d", bytes.fromhex("fff8000000000abc"))[0]


def round_trip(state):
    tensors = {}
    structure = json.dumps(pack(state, tensors), allow_nan=False)
    return unpack(json.loads(structure), tensors)


def assert_same(found, expected):
    """Check that values are equal in type, order and bits."""
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
        return
    assert type(found) is (dict if isinstance(expected, dict) else type(expected))
    if isinstance(expected, dict):
        assert list(found) == list(expected) and [type(key) for key in found] == [type(key) for key in expected]
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, float):
        assert struct.pack("d", found) == struct.pack("d", expected)
    else:
        assert found == expected


@pytest.mark.parametrize(
    "state",
    [
        {}, [], (), None, True, 0, -(2**200), "", "nul \0 \ud800 ß", {"a": {}, "b": [[], ()]},
        [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan, NAN_WITH_PAYLOAD],
        {0: 1, "0": 2, -3: {"x": True}}, {"$tensor": "a", "b": 1}, {"$dict": []}, {"$": ({"$tuple": 1.0},)},
        collections.OrderedDict(b=1, a=2), random.Random(3).getstate(), torch.arange(3),
        {"a.b": torch.zeros(1), "a": {"b": torch.ones(2)}, "a.b'": torch.arange(3)},
    ],
    ids=lambda state: repr(state)[:30],
)  # fmt: skip
def test_a_state_comes_back_the_same(state):
    assert_same(round_trip(state), state)


@pytest.mark.parametrize("build", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
def test_an_optimizer_goes_on_from_its_packed_state(build):
    def make():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        return model, build(model.parameters())

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()

    model, optimizer = make()
    step(model, optimizer)
    other, resumed = make()
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(round_trip(copy.deepcopy(optimizer.state_dict())))
    step(model, optimizer)
    step(other, resumed)
    assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({1, 2}, "a.0 is of type set"),
        (b"bytes", "of type bytes"),
        (print, "of type builtin_function_or_method"),
        (torch.float32, "of type dtype"),
        (torch.Size([1]), "of type Size"),
        (torch.ones(2, 2).to_sparse(), "torch.sparse_coo"),
        (torch.ones(2, device="meta"), "on meta"),
        ({(1, 2): 3}, r"a.0 has the key \(1, 2\) of type tuple"),
        ({True: 3}, "a.0 has the key True of type bool"),
    ],
)
def test_what_does_not_fit_is_named_by_its_path_and_type(value, complaint):
    with pytest.raises(ConfigError, match=complaint):
        pack({"a": [value]}, {})


def test_a_state_that_is_itself_of_another_type_is_named():
    with pytest.raises(ConfigError, match=r"^the value is of type set"):
        pack({1}, {})


def test_a_recursive_state_is_refused():
    state = {}
    state["again"] = [state]
    with pytest.raises(ConfigError, match=r"^again\.0\.again.* is nested more than 100 levels deep"):
        pack(state, {})


@pytest.mark.parametrize(
    "structure",
    [{"$tensor": "gone"}, {"$float": "xy"}, {"$float": "00"}, {"$unknown": 1}, {"$dict": [[1]]}, {"$dict": [[[], 1]]},
     {"$tuple": 3}, {"$tensor": "x", "more": 1}, {"$tensor": []}],
)  # fmt: skip
def test_a_foreign_structure_is_refused(structure):
    with pytest.raises(_INVALID):
        unpack({"a": [structure]}, {})
