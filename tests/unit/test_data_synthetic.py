"""Synthetic data: determined by the seed, with the same rule in both splits, and learnable by a small model."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.errors import ConfigError
from paceline.workloads.data import KINDS, DataForm, DataRequest
from paceline.workloads.data.sets import load_data


def load(kind, split="train", form=None, **fields):
    return load_data(DataRequest(name=f"synthetic:{kind}" if kind else "synthetic", **fields), split, form)


def prepared(data, indices, epoch=0):
    indices = torch.as_tensor(indices)
    return data.prepare(data.take(indices), indices, epoch)


class Bag(nn.Module):
    """The masked mean of the word vectors, and a hidden layer."""

    def __init__(self, form):
        super().__init__()
        self.words = nn.Embedding(form.vocabulary, 16)
        self.head = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, inputs, mask):
        weights = mask[:, :, None].float()
        return self.head((self.words(inputs) * weights).sum(1) / weights.sum(1))


def build_learner(data):
    form = data.form
    if form.kind == "images":
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, form.num_classes))
    if form.kind == "numbers":
        return nn.Linear(form.shape[0], 1)
    return Bag(form) if form.kind == "pairs" else nn.Embedding(form.vocabulary, form.vocabulary)


def loss_of(model, batch, kind):
    outputs = model(batch.inputs) if batch.mask is None else model(batch.inputs, batch.mask)
    if kind == "numbers":
        assert outputs.shape == batch.targets.shape
        return F.mse_loss(outputs, batch.targets)
    return F.cross_entropy(outputs.flatten(0, -2), batch.targets.flatten())


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_learns_the_rule_and_it_holds_for_the_test_split(kind):
    torch.manual_seed(0)
    data, test = load(kind), load(kind, "test")
    assert (len(data), len(test)) == (2048, 512)
    model = build_learner(data)
    rate = {"images": 1e-3, "tokens": 0.2}.get(kind, 0.02)
    held = prepared(test, torch.arange(len(test)))
    with torch.no_grad():
        before = loss_of(model, held, kind).item()
    for step in range(96):
        loss = loss_of(model, prepared(data, torch.arange(64) + 64 * (step % 32)), kind)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():  # sign descent by hand, because torch's optimizers load the compiler
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= rate * gradient.sign()
    with torch.no_grad():
        assert loss_of(model, held, kind).item() < before / 2


@pytest.mark.parametrize("kind", KINDS)
def test_sets_follow_from_seed_and_split(kind):
    torch.manual_seed(1)
    first = load(kind, samples=32)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again, other, test = load(kind, samples=32), load(kind, samples=32, seed=1), load(kind, "test", samples=32)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(first) == 32 and len(test) == 512
    assert torch.equal(first.inputs, again.inputs) and torch.equal(first.targets, again.targets)
    assert not torch.equal(first.inputs, other.inputs)
    assert not torch.equal(first.inputs, test.inputs[:32])


@pytest.mark.parametrize(
    ("form", "shape", "dtype"),
    [
        (DataForm(kind="images", shape=(1, 28, 28), num_classes=4), (2, 1, 28, 28), torch.float32),
        (DataForm(kind="numbers", shape=(5,), num_classes=0), (2, 5), torch.float32),
        (DataForm(kind="tokens", shape=(12,), num_classes=300, vocabulary=300), (2, 12), torch.int64),
    ],
)
def test_a_set_takes_the_form_of_the_model(form, shape, dtype):
    data = load("", form=form, samples=300)
    batch = prepared(data, [299, 0])
    assert data.form == form and len(data) == 300
    assert tuple(batch.inputs.shape) == shape and batch.inputs.dtype == dtype
    if form.kind == "images":
        assert set(data.targets.tolist()) == set(range(4))


def test_images_are_bytes_until_they_are_prepared():
    data = load("images", samples=64)
    assert data.take(torch.tensor([3])).inputs.dtype == torch.uint8
    batch = prepared(data, torch.arange(64))
    assert abs(batch.inputs.mean()) < 0.3 and 0.5 < batch.inputs.std() < 1.5


def test_tokens_predict_the_next():
    batch = prepared(load("tokens", context=9, samples=8), [1, 2])
    assert batch.inputs.shape == batch.targets.shape == (2, 9)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])


@pytest.mark.parametrize("vocabulary", [4, 5, 64, 5000])
def test_pairs_are_padded_at_the_end_and_masked(vocabulary):
    form = DataForm(kind="pairs", shape=(11,), num_classes=2, vocabulary=vocabulary, pad=2)
    data = load("", form=form, samples=200)
    indices = torch.tensor([5, 0, 7])
    batch = prepared(data, indices)
    lengths = data.lengths[indices]
    assert batch.inputs.shape == batch.mask.shape == (3, lengths.max())
    assert torch.equal(batch.mask.sum(1), lengths)
    assert torch.equal(batch.inputs == 2, batch.mask == 0)
    assert torch.equal(batch.mask, batch.mask.sort(descending=True).values)
    assert int(data.inputs.min()) >= 0 and int(data.inputs.max()) < vocabulary
    assert data.lengths.min() < data.lengths.max() <= 11


def test_another_kind_than_the_models_is_generated_on_request():
    form = DataForm(kind="images", shape=(1, 28, 28), num_classes=4)
    assert load("tokens", form=form, samples=4).form.kind == "tokens"


@pytest.mark.parametrize(
    ("kind", "fields", "value"), [("", {}, "synthetic:KIND"), ("pairs", {"context": 2}, "2 tokens")]
)
def test_sets_that_cannot_be_generated(kind, fields, value):
    with pytest.raises(ConfigError, match=value):
        load(kind, **fields)
