"""Layout of gradients in memory: every element once, in plan order, with the parameter's own strides."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.parallel import flat
from paceline.parallel.flat import FlatGradients, LiveBucket, Pack
from paceline.parallel.replicas import read_replica
from paceline.plan import Bucket, Piece, Plan
from tests.unit.made_plans import plan_by_cap, plan_in_pieces


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.none = nn.Parameter(torch.zeros(0))
        self.low = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        self.wave = nn.Parameter(torch.zeros(3, dtype=torch.complex64))


REPLICA = read_replica(Model())
ORDER = list(reversed(range(len(REPLICA.params))))


@pytest.mark.parametrize("cap", [16, 64, 10_000])
def test_every_element_has_its_own_place_in_its_bucket(cap):
    plan = plan_in_pieces(REPLICA.gradients, ORDER, cap, 8)
    flat = FlatGradients(REPLICA, plan, num_words=7)
    for index, view in flat.views.items():
        param = REPLICA.params[index]
        assert view.shape == param.shape and view.dtype == param.dtype
        assert param.numel() < 2 or view.stride() == param.stride()
        view.fill_(1)
    assert flat.words.numel() == 7 and flat.words.float().abs().sum() == 0
    # There are as many ones as elements, so views do not overlap and all lie inside the ranges. The padding is zero.
    assert sum(int((span == 1).sum()) for span in flat.ranges) == sum(param.numel() for param in REPLICA.params)
    assert all(((span == 1) | (span == 0)).all() for span in flat.ranges)
    assert flat.messages[-1].nbytes >= flat.ranges[-1].nbytes + 7 * flat.words.element_size()


def test_buckets_and_large_gradients_are_aligned():
    plan = plan_by_cap(REPLICA.gradients, ORDER, 10_000)
    flat = FlatGradients(REPLICA, plan, num_words=7, separate={0})
    assert all(span.storage_offset() * span.element_size() % 64 == 0 for span in flat.ranges)
    assert flat.views[0].storage_offset() * 4 % 64 == 0 and flat.views[0].storage_offset() > 0


def test_a_write_through_a_view_changes_only_its_buckets_version():
    plan = plan_by_cap(REPLICA.gradients, ORDER, 1)
    flat = FlatGradients(REPLICA, plan, num_words=0)
    before = [span._version for span in flat.ranges]
    flat.views[ORDER[0]].add_(1)
    assert [span._version - old for span, old in zip(flat.ranges, before, strict=True)] == [1, 0, 0, 0, 0, 0]


def test_uncopied_gradients_take_no_space():
    plan = plan_by_cap(REPLICA.gradients, ORDER, 1)
    flat = FlatGradients(REPLICA, plan, 0, uncopied={0})
    assert 0 not in flat.views and sum(span.numel() for span in flat.ranges) == sum(
        param.numel() for param in REPLICA.params[1:]
    )


def test_pieces_out_of_order_are_refused():
    replica = read_replica(nn.Linear(2, 1, bias=False))
    plan = Plan(replica.gradients, (Bucket((Piece(0, 4, 8),)), Bucket((Piece(0, 0, 4),))))
    with pytest.raises(ConfigError, match="weight") as caught:
        FlatGradients(replica, plan, num_words=0)
    assert caught.value.code == "plan"


# -- gradients packed into one message --------------------------------------------------------------------------------


def build_params() -> list[nn.Parameter]:
    shapes = ((3, 4), (5,), (2, 3, 2, 2))
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    params[2].data = params[2].data.to(memory_format=torch.channels_last)
    return params


def set_gradients(params: list[nn.Parameter], value: float) -> None:
    for number, param in enumerate(params):
        param.grad = torch.full_like(param, value + number)


def clear(params: list[nn.Parameter]) -> None:
    for param in params:
        param.grad = None


def test_a_pack_holds_gradients_followed_by_control_words():
    params = build_params()
    pack = Pack(params, torch.empty(0), 7)
    set_gradients(params, 1.0)
    message = pack.fill(2.0)
    for number, param in enumerate(params):
        assert param.grad is pack.views[number] and param.grad.stride() == param.stride()
        assert (param.grad == 2.0 * (1 + number)).all()
        assert param.grad.storage_offset() * 4 % 16 == 0
    pack.find_words(message).fill_(9.0)
    message[12 + 5 : 12 + 8] = 0.0  # the gap, which is never filled
    assert message.sum() == 2 * (12 * 1 + 5 * 2 + 24 * 3) + 7 * 9.0
    assert pack.build_zeros().shape == message.shape and not pack.find_words(pack.build_zeros()).any()


def test_control_words_after_complex_gradients_are_real():
    params = [nn.Parameter(torch.zeros(3, dtype=torch.complex64))]
    pack = Pack(params, torch.empty(0, dtype=torch.complex64), 7)
    set_gradients(params, 1.0)
    words = pack.find_words(pack.fill(1.0))
    assert words.shape == (7,) and words.dtype == torch.float32 and pack.message.numel() == 4 + 4


def test_a_packs_memory_is_freed_while_no_gradient_uses_it():
    params = build_params()
    pack = Pack(params, torch.empty(0), 0)
    views = []
    for step in range(3):
        set_gradients(params, step)
        pack.fill(1.0)
        pack.end_step()
        views.append(pack.views)
        pack.free()
        assert pack.message.untyped_storage().nbytes() == pack.message.nbytes > 0
        assert [param.grad.mean() for param in params] == [step, step + 1, step + 2]
        clear(params)
        pack.free()
        assert pack.message.untyped_storage().nbytes() == 0
    assert views[0] is views[1] is views[2]


def test_memory_of_large_gradients_is_freed_with_them(monkeypatch):
    monkeypatch.setattr(flat, "_LASTING_BYTES", 8)
    params = build_params()
    pack = Pack(params, torch.empty(0), 0)
    for step in range(2):
        set_gradients(params, step)
        pack.fill(1.0)
        assert pack.find_changed() == []
        memory = [weakref.ref(pack.message.untyped_storage())]
        pack.end_step()
        assert pack.views == [] and [param.grad.mean() for param in params] == [step, step + 1, step + 2]
        params[0].sum().backward()
        pack.fill(1.0)  # gradients accumulate into the existing one
        memory.append(weakref.ref(pack.message.untyped_storage()))
        pack.end_step()
        assert [param.grad.mean() for param in params] == [step + 1, step + 1, step + 2]
        clear(params)
        gc.collect()
        assert [reference() for reference in memory] == [None, None]


def test_gradients_share_a_message_and_one_alone_is_reduced_in_place():
    replica = read_replica(nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in (10, 2, 1, 4)]))
    plan = plan_by_cap(replica.gradients, range(4), 40)
    assert [len(part) for part in plan.partition] == [1, 3]
    memory = FlatGradients(replica, plan, num_words=7, uncopied=set(range(4)), separate=set(range(4)))
    first, last = (LiveBucket(number, memory, replica.params, packs=True) for number in (0, 1))
    assert first.pack is None and first.in_place == [0] and not first.sends_words
    assert last.pack is not None and last.in_place == [] and last.sends_words
    assert last.pack.message.dtype == torch.float32
    apart = LiveBucket(1, memory, replica.params, packs=False)
    assert apart.pack is None and sorted(apart.in_place) == [1, 2, 3] and not apart.sends_words


def test_the_last_bucket_packs_a_single_gradient_with_the_control_words():
    replica = read_replica(nn.ParameterList([nn.Parameter(torch.zeros(10))]))
    plan = plan_by_cap(replica.gradients, range(1), 40)
    memory = FlatGradients(replica, plan, num_words=7, uncopied={0}, separate={0})
    bucket = LiveBucket(0, memory, replica.params, packs=True)
    assert bucket.sends_words and bucket.in_place == []


HOLDS: dict[str, Callable[[nn.Parameter, nn.Parameter], object]] = {
    "the gradient": lambda param, _: param.grad,
    "another tensor of it": lambda param, _: param.grad.detach(),
    "a part of it": lambda param, _: param.grad[:1],
    "another parameter": lambda param, other: setattr(other, "grad", param.grad),
}


@pytest.mark.parametrize("frees", [True, False], ids=["before backward", "never"])
@pytest.mark.parametrize("how", HOLDS)
def test_memory_that_the_program_still_uses_is_left_to_it(how, frees):
    params, other = build_params(), nn.Parameter(torch.zeros(3, 4))
    pack = Pack(params, torch.empty(0), 0)
    set_gradients(params, 1.0)
    pack.fill(1.0)
    held = HOLDS[how](params[0], other)
    clear(params)
    if frees:
        pack.free()
    set_gradients(params, 5.0)
    pack.fill(1.0)
    assert (params[0].grad == 5.0).all()
    assert ((held if isinstance(held, torch.Tensor) else other.grad) == 1.0).all()


def test_gradients_in_the_pack_are_accumulated_in_place():
    params = build_params()
    pack = Pack(params, torch.empty(0), 0)
    set_gradients(params, 1.0)
    pack.fill(1.0)
    views, held = pack.views, params[1].grad
    (3 * params[0].sum() + 4 * params[1].sum()).backward()
    params[2].grad = None
    pack.fill(0.5)  # as in torch, even if the program keeps a reference to the gradient
    assert [param.grad.unique().tolist() for param in params] == [[2.0], [3.0], [0.0]]
    assert pack.views is views and held is params[1].grad


def test_gradients_that_change_after_packing_are_found():
    params = build_params()
    pack = Pack(params, torch.empty(0), 0)
    set_gradients(params, 1.0)
    pack.fill(1.0)
    assert pack.find_changed() == []
    params[1].sum().backward()
    assert pack.find_changed() == [1]
    params[0].grad = params[0].grad.clone()
    assert pack.find_changed() == [0, 1]
