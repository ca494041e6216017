"""Models by name: rejected requests, built models, and benchmark sizes."""

import pytest
import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.measure.bench_settings import DEFAULT_MODELS
from paceline.measure.wrappers import build_module
from paceline.workloads.data import DataForm
from paceline.workloads.registry import (
    NAMES,
    WORKLOADS,
    ModelOptions,
    build_model,
    check_model,
    default_form,
    describe_model,
)

from ..policy.reading import run_without_torch

PLAIN = ModelOptions()
GRAY = DataForm(kind="images", shape=(1, 28, 28), num_classes=10)
COLOR = DataForm(kind="images", shape=(3, 32, 32), num_classes=7)
NUMBERS = DataForm(kind="numbers", shape=(5,), num_classes=0)
TOKENS = DataForm(kind="tokens", shape=(12,), num_classes=30, vocabulary=30)
PAIRS = DataForm(kind="pairs", shape=(12,), num_classes=2, vocabulary=30, pad=29)
SMALL = ("linear", "mlp", "cnn", "resnet18", "resnet18-imagenet", "gpt2-tiny", "gpt2-mini")


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def make_inputs(form, batch_size=2):
    if form.kind in ("tokens", "pairs"):
        return torch.randint(form.vocabulary, (batch_size, *form.shape))
    return torch.randn(batch_size, *form.shape)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("resnet", {}, "model 'resnet' is unknown: did you mean resnet18"),
        ("gpt2_large", {}, "did you mean gpt2-large"),
        ("zebra", {}, r"model 'zebra' is unknown: use one of linear, mlp, .*hf:NAME_OR_FOLDER, FILE.py:FUNCTION"),
        ("resnet18", {"channels": (16, 32)}, r"resnet18 has no channels \(given: 16 32\): it takes no options"),
        ("linear", {"hidden": 8}, r"linear has no hidden \(given: 8\): it takes no options"),
    ],
)
def test_a_bad_request_is_refused(name, options, words):
    with pytest.raises(ConfigError, match=words):
        check_model(name, ModelOptions(**options))


def test_checking_and_the_default_form_need_no_torch():
    program = """
from paceline.workloads.registry import NAMES, ModelOptions, check_model, default_form
for name in NAMES:
    check_model(name, ModelOptions())
    print(name, default_form(name).kind)
"""
    done = run_without_torch(program)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(NAMES)


@pytest.mark.parametrize(
    ("name", "form", "shape"),
    [
        *(
            (name, form, (2, form.num_classes))
            for name in ("cnn", "resnet18", "mlp", "linear")
            for form in (GRAY, COLOR)
        ),
        ("resnet18-imagenet", COLOR, (2, 7)),
        ("mlp", NUMBERS, (2, 1)),
        ("linear", NUMBERS, (2, 1)),
        ("gpt2-tiny", TOKENS, (2, 12, 30)),
        ("gpt2-tiny", PAIRS, (2, 2)),
    ],
)
def test_what_comes_out_fits_the_data(name, form, shape):
    assert build_model(name, form, PLAIN)(make_inputs(form)).shape == shape


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "resnet18-imagenet")) for name in SMALL]
)
def test_every_parameter_learns_on_the_default_form(name):
    form = default_form(name)
    module = build_model(name, form, PLAIN)
    module(make_inputs(form)).square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in module.parameters())
    assert describe_model(name) == ""


@pytest.mark.parametrize(
    ("name", "form", "words"),
    [
        ("cnn", TOKENS, r"model cnn takes images, but the data is tokens: models for tokens are gpt2-tiny.*hf:NAME"),
        ("gpt2", GRAY, r"model gpt2 takes tokens or pairs, but the data is images: .*linear, mlp, cnn, resnet18"),
        ("resnet18", NUMBERS, r"models for numbers are linear, mlp$"),
    ],
)
def test_a_model_and_data_that_do_not_fit_are_both_named(name, form, words):
    with pytest.raises(ConfigError, match=words):
        build_model(name, form, PLAIN)


@pytest.mark.parametrize(
    ("channels", "hidden", "elements"),
    [
        ((16, 32), 128, 596_042),
        ((32, 64), 128, 1_199_882),
        ((32, 64, 128), 512, 2_457_610),
        ((64, 128, 256), 2048, 19_266_570),
    ],
)
def test_the_sizes_of_cnn(channels, hidden, elements):
    with torch.device("meta"):
        assert count(build_model("cnn", GRAY, ModelOptions(channels=channels, hidden=hidden))) == elements


@pytest.mark.parametrize(("form", "most"), [(GRAY, 5), (COLOR, 5)])
def test_the_size_of_images_limits_the_channels_of_cnn(form, most):
    options = ModelOptions(channels=(4,) * most, hidden=8)
    assert build_model("cnn", form, options)(make_inputs(form)).shape == (2, form.num_classes)
    with pytest.raises(ConfigError, match=f"9 convolutions .*{most} channels"):
        build_model("cnn", form, ModelOptions(channels=(4,) * 9))


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("gpt2-tiny", 842_880),
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("resnet18", 11_173_962),
        ("resnet18-imagenet", 11_689_512),
    ],
)
def test_the_published_sizes(monkeypatch, name, elements):
    monkeypatch.setattr(
        torch.nn.init, "normal_", lambda tensor, **_: tensor
    )  # on meta this loads all of torch's compiler
    with torch.device("meta"):
        assert count(build_model(name, default_form(name), PLAIN)) == elements


@pytest.mark.parametrize(
    ("name", "form"), [("mlp", NUMBERS), ("cnn", GRAY), ("gpt2-tiny", TOKENS), ("gpt2-tiny", PAIRS)]
)
def test_dropout_is_in_training_only_and_off_by_default(name, form):
    inputs = make_inputs(form)
    dropped, whole = (build_model(name, form, options) for options in (ModelOptions(dropout=0.5), PLAIN))
    assert torch.equal(whole(inputs), whole(inputs))
    assert not torch.equal(dropped(inputs), dropped(inputs))
    dropped.eval()
    assert torch.equal(dropped(inputs), dropped(inputs))


CPU = torch.device("cpu")


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_model_is_as_large_as_the_catalog_says(monkeypatch, name):
    monkeypatch.setattr(nn.init, "normal_", lambda tensor, **_: tensor)  # on meta this loads all of torch's compiler
    with torch.device("meta"):
        parameters = list(WORKLOADS[name].build().parameters())
    assert len(parameters) == WORKLOADS[name].num_parameters
    assert sum(parameter.numel() for parameter in parameters) == WORKLOADS[name].num_elements


def test_benchmarks_have_many_tensors_or_many_bytes():
    assert WORKLOADS["tiny"].num_parameters == 1000
    assert 4 * WORKLOADS["mlp"].num_elements > 64 * 2**20


@pytest.mark.parametrize("name", DEFAULT_MODELS)
def test_every_parameter_gets_a_gradient(name):
    workload = WORKLOADS[name]
    module = build_module(name, 0, CPU)
    loss = workload.compute_loss(module, workload.make_batch(2, 0, 0, CPU))
    loss.backward()
    assert torch.isfinite(loss)
    for path, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), path
        assert parameter.grad.any(), path


def test_gpt2_looks_back_only_and_ties_its_head():
    module = build_module("gpt2-mini", 0, CPU).eval()
    ids = torch.arange(8).reshape(1, 8)
    changed = ids.clone()
    changed[0, 5] = 77
    before, after = module(ids), module(changed)
    assert torch.equal(before[0, :5], after[0, :5]) and not torch.equal(before[0, 5:], after[0, 5:])
    with torch.no_grad():
        module.tokens.weight[4000] += 1  # a token that is absent from the input changes only its own logit
    apart = (module(ids) != before).any(dim=1)[0]
    assert apart.nonzero().flatten().tolist() == [4000]


@pytest.mark.parametrize("name", ["cnn", "gpt2-mini"])
def test_batches_follow_from_seed_and_rank(name):
    def make(seed, rank):
        batch = WORKLOADS[name].make_batch(3, seed, rank, CPU)
        return batch.inputs, batch.targets

    first, again, other_rank, other_seed = make(1, 0), make(1, 0), make(1, 1), make(2, 0)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other_rank[0]) and not torch.equal(first[0], other_seed[0])
    assert first[0].shape[0] == first[1].shape[0] == 3


def test_modules_follow_from_the_seed_and_leave_the_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, again, other = (build_module("cnn", seed, CPU) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(next(first.parameters()), next(other.parameters()))
