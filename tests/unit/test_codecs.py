"""Codecs on replicas in one process: averages, messages, residuals, and state that must be discarded."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
import torch._dynamo  # the dispatch mode below imports it, which sets an environment variable
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.parallel import codecs
from paceline.parallel.codecs import GATHER, SUM, SWAP, build_codec, run_together
from paceline.parallel.graph import find_tensors
from paceline.plan import Gradient
from paceline.strategy import Strategy
from paceline.transport import native

LOSSY = ("int8", "int4", "topk:0.05", "powersgd:2")
ALL = ("dense", "bf16", *LOSSY, "topk:0.05,dgc,warmup=3")
# Shapes with one and four dimensions, odd, empty, scalar, without columns, with one row; no size is a multiple of a
# block.
SHAPES = ((37, 29), (13,), (5, 3, 3, 3), (0, 4), (), (4, 0), (1, 300), (301,))
NAMES = tuple(f"p{index}" for index in range(len(SHAPES)))
# Tolerances in float32, relative to the largest element.
ROUNDING = 1e-5
NUM_STEPS = 60


def build(text: str, num_ranks: int) -> list[codecs.Codec]:
    strategy = Strategy.parse(text)
    return [build_codec(strategy, rank, num_ranks) for rank in range(num_ranks)]


def draw(num_ranks: int, step: int = 0, shapes=SHAPES) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + step)
    return [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(num_ranks)]


def average(ranks: list[codecs.Codec], grads: list[list[torch.Tensor]], step: int = 0, names=NAMES) -> None:
    run_together([codec.average(names, mine, step) for codec, mine in zip(ranks, grads, strict=True)])


def mean(grads: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack(parts).double().mean(0) for parts in zip(*grads, strict=True)]


@pytest.fixture(params=["core", "torch", "gpu"])
def either(request, monkeypatch):
    """Run with and without the compiled core, and as on a GPU: each bucket is one vector, and the host never waits."""
    if request.param == "torch":
        monkeypatch.setattr(codecs, "_library", lambda: None)
    elif request.param == "gpu":
        pretend_gpu(monkeypatch)
    elif native.why_not():
        pytest.skip(f"NOT TESTED: {native.why_not()}")
    return request.param


def pretend_gpu(monkeypatch) -> None:
    monkeypatch.setattr(codecs, "_library", lambda: None)
    monkeypatch.setattr(codecs, "_is_on_cpu", lambda vectors: False)
    monkeypatch.setattr(codecs, "_are_finite", lambda *many: torch.stack([t.isfinite().all() for t in many]).all())


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("text", ALL)
def test_all_ranks_get_the_same_average_near_the_mean(text, num_ranks, either):
    ranks, grads = build(text, num_ranks), draw(num_ranks)
    wanted = mean(grads)
    average(ranks, grads)
    for mine in grads[1:]:
        assert all(map(torch.equal, mine, grads[0]))
    limit = {"dense": 1e-6, "bf16": 0.02, "int8": 0.05, "int4": 0.8}.get(text, math.inf)
    for found, want in zip(grads[0], wanted, strict=True):
        assert not found.numel() or (found - want).abs().max() <= limit


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_top_k_with_density_1_is_the_all_reduce(num_ranks, either):
    grads = draw(num_ranks)
    wanted = copy.deepcopy(grads)
    average(build("topk:1", num_ranks), grads)
    average(build("dense", num_ranks), wanted)
    assert all(map(torch.equal, grads[0], wanted[0]))


def test_top_k_keeps_signs_and_indices(either):
    """Each rank's largest elements are at different positions, so summing values by magnitude rank would be wrong."""
    grads = [[torch.tensor([[0.1, -5.0, 0.2, 0.3]])], [torch.tensor([[0.1, 0.2, 0.3, 3.0]])]]
    average(build("topk:0.25", 2), grads, names=("p",))
    assert grads[0][0].tolist() == [[0, -2.5, 0, 1.5]]


@pytest.mark.parametrize("num_large", [0, 1])
def test_top_k_sends_biases_and_norms_whole(num_large, either):
    """With DGC, the momentum equals that of an optimizer, without delay."""
    names, shapes = ("m", "b", "c")[1 - num_large :], ((9, 7), (5,), (300,))[1 - num_large :]
    ranks, twice = build("topk:0.01", 2), build("topk:0.01,dgc=0.5", 2)
    speed = [torch.zeros(shape).double() for shape in shapes]
    for step in range(2):
        grads, others = draw(2, step, shapes), draw(2, step, shapes)
        before = mean(grads)
        speed = [0.5 * old + new for old, new in zip(speed, before, strict=True)]
        average(ranks, grads, step, names)
        average(twice, others, step, names)
        ahead = [new + 0.5 * now for now, new in zip(speed, before, strict=True)]
        for found, wanted in ((grads, before), (others, ahead)):
            for mine, one in zip(found[0][num_large:], wanted[num_large:], strict=True):
                torch.testing.assert_close(mine.double(), one, rtol=1e-6, atol=1e-7)
    assert set(ranks[0].errors) == {"m"} & set(names)


def test_power_sgd_of_sufficient_rank_is_the_mean(either):
    """The average is exact for a product of thin matrices whose rank is at most that of the transmitted factors."""
    generator = torch.Generator().manual_seed(3)
    left = torch.randn(40, 3, generator=generator)
    grads = [[left @ torch.randn(3, 30, generator=generator), torch.randn(7, generator=generator)] for _ in range(3)]
    wanted = mean(grads)
    average(build("powersgd:3", 3), grads, names=("m", "b"))
    for found, want in zip(grads[0], wanted, strict=True):
        torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text", LOSSY)
def test_nothing_is_lost_or_counted_twice_over_many_steps(text, either):
    """The applied updates plus the mean residual equal the sum of the mean gradients."""
    num_ranks, shapes, names = 3, ((24, 17), (31,)), ("m", "b")
    ranks, applied, given = build(text, num_ranks), None, None
    for step in range(NUM_STEPS):
        grads = draw(num_ranks, step, shapes)
        total = mean(grads)
        average(ranks, grads, step, names)
        found = [grad.double() for grad in grads[0]]
        applied = found if applied is None else [a + b for a, b in zip(applied, found, strict=True)]
        given = total if given is None else [a + b for a, b in zip(given, total, strict=True)]
    for name, have, want in zip(names, applied, given, strict=True):
        left = [codec.errors[name].double() for codec in ranks if name in codec.errors]
        have = have + (sum(left) / num_ranks).view_as(have) if left else have
        torch.testing.assert_close(have, want, rtol=0, atol=NUM_STEPS * ROUNDING * float(want.abs().max()))


@pytest.mark.parametrize("text", ["topk:0.05,feedback=0", "int4,feedback=0", "powersgd:1,feedback=0"])
def test_without_feedback_there_are_no_residuals(text, either):
    ranks = build(text, 2)
    for step in range(2):
        average(ranks, draw(2, step), step)
    assert not ranks[0].errors


@pytest.mark.parametrize("num_ranks", [2, 5])
@pytest.mark.parametrize("text", [text for text in ALL if "warmup" not in text] + ["powersgd:100", "topk:1"])
def test_messages_match_the_strategys_traffic(text, num_ranks, either):
    strategy, found = Strategy.parse(text), []

    def watch(exchange):
        value = None
        while True:
            try:
                kind, tensor = exchange.send(value)
            except StopIteration:
                return
            found.append((kind, tensor.nbytes))
            value = yield kind, tensor

    ranks, grads = build(text, num_ranks), draw(num_ranks)
    exchanges = [codec.average(NAMES, mine, 0) for codec, mine in zip(ranks, grads, strict=True)]
    run_together([watch(exchanges[0]), *exchanges[1:]])
    shapes = [Gradient(name, math.prod(s) * 4, shape=s) for name, s in zip(NAMES, SHAPES, strict=True)]
    assert found == [(message.kind, message.num_bytes) for message in strategy.traffic(shapes, num_ranks)]
    sizes = {SUM: 2 * (num_ranks - 1) / num_ranks, GATHER: num_ranks - 1, SWAP: (num_ranks - 1) / num_ranks}
    for (kind, num_bytes), message in zip(found, strategy.traffic(shapes, num_ranks), strict=True):
        assert message.sent_bytes(num_ranks) == math.ceil(sizes[kind] * num_bytes - 1e-9)


def test_bf16_without_a_precise_sum_sends_as_much_and_rounds_at_most_twice(either):
    """A ring in bfloat16 would lose most of 64 equal numbers, so the shards are summed in float32."""
    grads = [[torch.full((7,), 1.0 + 2**-7)] for _ in range(64)]
    average(build("bf16", 64), grads, names=("p",))
    assert torch.equal(grads[0][0], torch.full((7,), 1.0 + 2**-7))


@pytest.mark.parametrize("bad", [math.nan, pytest.param(-math.inf, marks=pytest.mark.slow)])
@pytest.mark.parametrize("text", ALL)
def test_a_non_finite_number_reaches_all_ranks_but_no_residual(text, bad, either):
    """Residuals of other buckets in the same step must not change either, because no rank applies any bucket."""
    ranks = build(text, 2)
    for step in range(2):
        average(ranks, draw(2, step), step)
    before = [copy.deepcopy((codec.errors, codec.common)) for codec in ranks]
    grads, others = draw(2, 2), draw(2, 3)
    grads[1][0][3, 4] = bad
    average(ranks, others, 2, [f"other {name}" for name in NAMES])
    average(ranks, grads, 2)
    for mine in grads:
        assert not torch.isfinite(mine[0]).all()
    for codec, (errors, common) in zip(ranks, before, strict=True):
        assert all(torch.equal(codec.errors[name], error) for name, error in errors.items())
        assert all(torch.equal(codec.common[name], value) for name, value in common.items())
        assert not any(error.any() for name, error in codec.errors.items() if "other" in name)
    grads, wanted = draw(2, 4), draw(2, 4)
    average(ranks, grads, 3)
    assert all(torch.isfinite(grad).all() for grad in grads[0])
    fresh = build(text, 2)
    for codec, (errors, common) in zip(fresh, before, strict=True):
        codec.errors, codec.common = errors, common
    average(fresh, wanted, 3)
    assert all(map(torch.equal, grads[0], wanted[0]))


@pytest.mark.parametrize("text", LOSSY)
def test_residuals_belong_to_parameters_not_to_buckets(text, either):
    """A parameter keeps its residual when it moves to another bucket, behind other parameters."""
    ranks = build(text, 2)
    average(ranks, draw(2), 0)
    left = [{name: error.clone() for name, error in codec.errors.items()} for codec in ranks]
    assert any(error.any() for error in left[0].values())
    grads, order = draw(2, 1), [3, 0, 7, 1]
    given = [[mine[index].clone() for index in order] for mine in grads]
    names = [NAMES[index] for index in order]
    average(ranks, given, 1, names)
    applied = mean(grads)
    for index, found in zip(order, given[0], strict=True):
        name = NAMES[index]
        if name in ranks[0].errors and found.numel():
            new = sum(codec.errors[name].double() for codec in ranks) / 2
            old = sum(errors[name].double() for errors in left) / 2 if name in left[0] else 0
            torch.testing.assert_close(found.double().view(-1) + new, applied[index].view(-1) + old, rtol=0, atol=1e-5)


def test_channels_last_and_half_precision_gradients_are_averaged_elementwise(either):
    for text in ALL:
        plain, other = ([[torch.randn(4, 3, 5, 5, generator=g)] for g in _generators(2)] for _ in range(2))
        turned = [[grad.to(memory_format=torch.channels_last) for grad in mine] for mine in other]
        halves = [[grad.bfloat16() for grad in mine] for mine in plain]
        wanted = [[grad.float() for grad in mine] for mine in halves]
        for grads in (plain, turned, halves, wanted):
            average(build(text, 2), grads, names=("p",))
        assert torch.equal(plain[0][0], turned[0][0])
        assert turned[0][0].is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(halves[0][0], wanted[0][0].bfloat16())


def _generators(num: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(num)]


@pytest.mark.parametrize("text", ALL)
def test_a_zero_gradient_stays_zero(text, either):
    ranks, grads = build(text, 2), [[torch.zeros(shape) for shape in SHAPES] for _ in range(2)]
    for step in range(3):
        average(ranks, grads, step)
    assert not any(grad.any() for grad in grads[0])
    assert not any(error.any() for error in ranks[0].errors.values())


def test_the_random_start_is_equal_on_all_ranks_and_keeps_the_users_generator(either):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    ranks = build("powersgd:2", 2)
    average(ranks, draw(2), 0)
    assert torch.equal(torch.get_rng_state(), before)
    firsts = [codec._first("m", torch.empty(9, 7), 2) for codec in ranks]
    assert torch.equal(*firsts) and firsts[0].std() > 0.1
    assert not torch.equal(firsts[0], ranks[0]._first("other", torch.empty(9, 7), 2))


def test_dgc_applies_momentum_before_sending():
    """If everything is sent, the result is the gradient with a momentum that restarts at the sent elements."""
    ranks = build("topk:1,dgc=0.9", 1)
    grads = [[torch.ones(3, 1)]]
    average(ranks, grads, 0, ("p",))
    torch.testing.assert_close(grads[0][0], torch.full((3, 1), 1.9))
    assert not ranks[0].errors["momentum p"].any()
    ranks = build("topk:0.34,dgc=0.5", 1)  # two of three elements
    applied = torch.zeros(3)
    for step in range(3):
        grads = [[torch.tensor([[4.0, 2.0, 1.0]])]]
        average(ranks, grads, step, ("p",))
        applied += grads[0][0][0]
    # The last two elements have velocities of 2 and 1, then 2 and 1.5, then 3 and 1. They contribute 3 and 1.5 (the
    # second is sent), 3 and 1.75 (the third is sent: 1.5 + 1.75), 3.5 and 1.5 (the second is sent: 3 + 3.5).
    assert applied.tolist() == [18, 9.5, 3.25]
    assert ranks[0].errors["p"].tolist() == [0, 0, 1.5] and ranks[0].errors["momentum p"].tolist() == [0, 0, 1]


def test_dgc_of_whole_gradients_is_sgd_with_momentum(either):
    codec, mine, theirs = build("topk:0.1,dgc=0.9", 1), torch.ones(4), torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, nesterov=True)
    for step in range(5):
        theirs.grad = torch.randn(4, generator=torch.Generator().manual_seed(step))
        grads = [[theirs.grad.clone()]]
        average(codec, grads, step, ("b",))
        mine -= 0.1 * grads[0][0]
        optimizer.step()
    torch.testing.assert_close(mine, theirs.detach())


def test_the_density_decreases_from_a_quarter_by_equal_factors():
    strategy = Strategy.parse("topk:0.001,dgc,warmup=4")
    found = [strategy.find_density(step) for step in range(6)]
    assert found[0] == 0.25 and found[4] == found[5] == 0.001
    ratios = [b / a for a, b in itertools.pairwise(found[:5])]
    assert all(math.isclose(ratio, ratios[0]) for ratio in ratios)


@pytest.mark.parametrize("size", [100_000, 300_001])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.5])
def test_the_largest_elements_are_found_by_sampling(size, density, either):
    values, errors = torch.randn(2, size, generator=torch.Generator().manual_seed(size))
    count = math.ceil(size * density)
    for error in (errors, torch.zeros(0)):
        into = torch.empty(size)
        places = codecs.add_and_find(values, error, into, count)
        total = values + errors if error.numel() else values
        assert torch.equal(into, total) and places.unique().numel() == count
        assert total[places].abs().min() == total.abs().topk(count).values[-1]
    values[7] = math.nan
    assert 7 in codecs.add_and_find(values, errors, torch.empty(size), count)


def test_equal_elements_do_not_rely_on_the_sample(either):
    values, into = torch.ones(100_000), torch.empty(100_000)
    assert codecs.add_and_find(values, torch.zeros(100_000), into, 50).unique().numel() == 50


@pytest.mark.skipif(bool(native.why_not()), reason=f"NOT TESTED: {native.why_not()}")
@pytest.mark.parametrize("cpu", ["sse2", "neon", "portable", "avx2", "avx512"])
@pytest.mark.parametrize("text", ["bf16", "int8", "int4", "topk:0.01"])
def test_the_core_and_torch_agree_bit_by_bit(text, cpu, monkeypatch):
    library = native.load_library()
    best = library.pln_cpu()
    if library.pln_use_cpu(cpu.encode()):
        pytest.skip(f"{cpu} is not a kind of this processor")
    shapes = (*SHAPES, (90_001,), (256,), (512, 3))
    names = tuple(map(str, range(len(shapes))))
    results = []
    try:
        for library_of in (codecs._library, lambda: None, None):
            monkeypatch.setattr(codecs, "_library", library_of)
            if library_of is None:
                pretend_gpu(monkeypatch)
            ranks = build(text, 3)
            for step in range(3):
                grads = draw(3, step, shapes)
                for mine in grads:
                    mine[0][0, :5] = torch.tensor([1e-42, -0.0, 1e30, 1e-30, 2.5])
                    mine[-2].mul_(1e-38)
                average(ranks, grads, step, names)
                left = ranks[1].errors
                results.append([*grads[0], *(left[name].clone() for name in names if name in left)])
    finally:
        library.pln_use_cpu(best)
    for by_core, by_torch, on_gpu in zip(results[:3], results[3:6], results[6:], strict=True):
        for one, *others in zip(by_core, by_torch, on_gpu, strict=True):
            assert all(torch.equal(one.view(torch.int32), other.view(torch.int32)) for other in others)


@pytest.mark.skipif(bool(native.why_not()), reason=f"NOT TESTED: {native.why_not()}")
def test_all_kinds_of_processor_compute_the_same_product():
    library, results = native.load_library(), []
    best = library.pln_cpu()
    base, right, matrix = torch.randn(33, 3), torch.randn(3, 301), torch.randn(33, 301)
    for cpu in (b"sse2", b"neon", b"portable", b"avx2", b"avx512"):
        if not library.pln_use_cpu(cpu):
            product, lost = matrix.clone(), torch.empty_like(matrix)
            codecs._subtract_product(product, lost, base, right)
            results.append((product, lost))
    library.pln_use_cpu(best)
    torch.testing.assert_close(results[0][0], base @ right)
    torch.testing.assert_close(results[0][1], matrix - results[0][0])
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(result, results[0], strict=True))


def test_memory_is_counted():
    ranks = build("int8", 2)
    shapes, names = ((100, 30),), ("m",)
    for step in range(2):
        average(ranks, draw(2, step, shapes), step, names)
    # The residual, memory for the next one, and the message: 12 blocks with their scales.
    assert ranks[0].memory_bytes in (2 * 4 * 3000, 2 * 4 * 3000 + 12 * 260)


def test_residuals_are_rescaled_by_name():
    codec = build("topk:0.5,dgc=0.9", 1)[0]
    average([codec], [[torch.tensor([[1.0, 8.0]]), torch.tensor([[3.0, 4.0]])]], 0, ("a", "b"))
    codec.rescale(["a", "unknown"], 4.0)
    assert codec.errors["a"].tolist() == pytest.approx([7.6, 0]) and codec.errors["b"].tolist() == pytest.approx(
        [5.7, 0]
    )
    assert codec.errors["momentum a"].tolist() == [1, 0]  # like an optimizer's momentum


@pytest.mark.parametrize("text", [*LOSSY, "topk:0.05,dgc"])
def test_discarded_averages_count_as_not_sent(text, either):
    """Discard some parameters, or a whole step. Two averages with the same name in one step are kept apart."""
    ranks, names, shapes = build(text, 2), ("m", "b"), ((24, 17), (31,))
    average(ranks, draw(2, 0, shapes), 0, names)
    before = [copy.deepcopy((codec.errors, codec.common)) for codec in ranks]
    for dropped in (["m"], None):
        average(ranks, draw(2, 1, shapes), 1, names)
        for codec in ranks:
            codec.discard(dropped)
        for codec, (errors, common) in zip(ranks, before, strict=True):
            kept = {name: error for name, error in errors.items() if dropped is None or name.endswith("m")}
            assert kept and all(torch.equal(codec.errors[name], error) for name, error in kept.items())
            assert all(torch.equal(codec.common[name], value) for name, value in common.items())
            if dropped and "b" in errors:
                assert not torch.equal(codec.errors["b"], errors["b"])
        for codec, (errors, common) in zip(ranks, before, strict=True):
            codec.errors, codec.common = copy.deepcopy((errors, common))
    if "dgc" in text:
        return
    given, applied = 0, 0
    for _ in range(3):
        grads = draw(2, 2, shapes)
        given = given + mean(grads)[0]
        average(ranks, grads, 7, names)
        applied = applied + grads[0][0].double()
    left = [
        sum(errors["m"].double() for errors in found) / 2
        for found in ([b[0] for b in before], [c.errors for c in ranks])
    ]
    torch.testing.assert_close(applied + left[1].view(24, 17), given + left[0].view(24, 17), rtol=0, atol=1e-4)


@pytest.mark.parametrize("rank", [1, 4])
def test_bases_of_many_matrices_are_orthonormal_or_zero(rank):
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(3, 40, rank, generator=generator), torch.randn(2, 7, rank, generator=generator) * 1e-18]
    thin = torch.randn(1, 9, min(rank, 2), generator=generator)
    for matrix, base in zip([*matrices, thin], codecs.orthonormalize_all([*matrices, thin]), strict=True):
        one = torch.eye(base.size(-1)).expand(len(base), -1, -1)
        torch.testing.assert_close(base.mT @ base, one, rtol=0, atol=1e-6)
        scale = float(matrix.abs().max())
        torch.testing.assert_close(base @ (base.mT @ matrix), matrix, rtol=0, atol=1e-5 * scale)
    # With dependent columns the basis still spans the column space, and nothing grows without bound.
    flat = matrices[0][:, :, :1].repeat(1, 1, 3) + 1e-7 * torch.randn(3, 40, 3, generator=generator)
    for matrix in (flat, torch.zeros(1, 5, 3)):
        (base,) = codecs.orthonormalize_all([matrix])
        assert torch.linalg.matrix_norm(base, 2).max() <= 1 + 1e-5
        torch.testing.assert_close(base @ (base.mT @ matrix), matrix, rtol=0, atol=1e-5)
    assert not torch.isfinite(codecs.orthonormalize_all([torch.full((1, 4, 2), math.nan)])[0]).any()


def test_message_memory_follows_the_buckets():
    codec, grads = build("bf16", 1)[0], [torch.ones(1000), torch.ones(24)]
    average([codec], [grads], 0, ("a", "b"))
    for step in (1, 2):
        average([codec], [grads[1:]], step, ("b",))
        average([codec], [grads[:1]], step, ("a",))
    assert codec.memory_bytes == 2 * 1024


class NewMemory(TorchDispatchMode):
    """Counts the bytes of new storage that operations allocate."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in find_tensors((args, kwargs))}
        made = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in find_tensors(result)}
        self.num_bytes += sum(num_bytes for storage, num_bytes in made.items() if storage not in given)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bf16_takes_no_memory_besides_its_message(dtype, either):
    """Nothing is allocated if the gradients are the message: the result is computed in place."""
    flat = torch.randn(1200, generator=torch.Generator().manual_seed(1)).to(dtype)
    grads, codec = [flat[:900].view(30, 30), flat[900:]], build("bf16", 2)[0]
    wanted = ((flat.float() / 2).bfloat16() * 2).to(dtype)
    for step in range(2):
        with NewMemory() as new:
            exchange = codec.average(("a", "b"), grads, step)
            _, sent = exchange.send(None)
        sent *= 2  # adds the other rank's equal values in place
        with NewMemory() as after, pytest.raises(StopIteration):
            exchange.send(sent)
        assert after.num_bytes == 0
        # On a GPU, torch's allocator keeps memory from the last step; elsewhere the codec keeps it.
        is_new = dtype == torch.float32 and (step == 0 or either == "gpu")
        assert new.num_bytes == (2 * flat.numel() if is_new else 0), (step, either)
        assert torch.equal(flat, wanted)


def test_bfloat16_gradients_are_averaged_like_float32(either):
    for num_ranks in (2, 3):
        grads = [[grad.bfloat16() for grad in mine] for mine in draw(num_ranks)]
        precise = [[grad.float() for grad in mine] for mine in grads]
        average(build("bf16", num_ranks), grads)
        average(build("bf16", num_ranks), precise)
        for one, other in zip(grads[0], precise[0], strict=True):
            assert torch.equal(one, other.bfloat16())
