"""The built-in models: losses, blocks, GPT-2."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.errors import ConfigError
from paceline.workloads.data import Batch, DataForm
from paceline.workloads.models import GPT2, compute_outcome, find_blocks
from paceline.workloads.registry import ModelOptions, build_model, default_form

IMAGES = DataForm(kind="images", shape=(3,), num_classes=4)
TOKENS = DataForm(kind="tokens", shape=(5,), num_classes=4, vocabulary=4)
NUMBERS = DataForm(kind="numbers", shape=(3,), num_classes=0)
DRAW = torch.Generator().manual_seed(1)
LOGITS, CLASSES = torch.randn(6, 4, generator=DRAW), torch.randint(4, (6,), generator=DRAW)
TOKEN_LOGITS, IDS = torch.randn(6, 5, 4, generator=DRAW), torch.randint(4, (6, 5), generator=DRAW)
VALUES, WANTED = torch.randn(6, 1, generator=DRAW), torch.randn(6, 1, generator=DRAW)


def answer(value, targets, form, mask=None):
    """The outcome of a model that returns this answer for any input."""
    return compute_outcome(lambda inputs, **rest: value, Batch(torch.zeros(len(targets), 3), targets, mask), form)


def test_a_smoothed_target_is_spread_over_all_classes():
    batch = Batch(torch.zeros(6, 3), CLASSES, None)
    outcome = compute_outcome(lambda inputs: LOGITS, batch, IMAGES, label_smoothing=0.2)
    logs = LOGITS.double().log_softmax(1)
    by_hand = -sum(0.8 * logs[k][CLASSES[k]] + 0.2 * logs[k].mean() for k in range(6))
    assert outcome.loss_sum.item() == pytest.approx(by_hand.item(), rel=1e-6)


def test_classes_cost_cross_entropy():
    outcome = answer(LOGITS, CLASSES, IMAGES)
    by_hand = sum(-LOGITS[k].double().softmax(0)[CLASSES[k]].log() for k in range(6))
    assert outcome.loss_sum.item() == pytest.approx(by_hand.item(), rel=1e-6)
    assert outcome.num_correct == sum(int(LOGITS[k].argmax()) == int(CLASSES[k]) for k in range(6))


def test_every_token_is_a_target():
    outcome = answer(TOKEN_LOGITS, IDS, TOKENS)
    by_hand = sum(-TOKEN_LOGITS[i, j].double().softmax(0)[IDS[i, j]].log() for i in range(6) for j in range(5))
    assert outcome.loss_sum.item() == pytest.approx(by_hand.item(), rel=1e-6)
    assert outcome.num_correct == (TOKEN_LOGITS.argmax(-1) == IDS).sum()


@pytest.mark.parametrize("shape", [(6, 1), (6,)])
def test_numbers_cost_the_squared_error(shape):
    """A column minus a row would broadcast to 36 errors."""
    outcome = answer(VALUES.reshape(shape), WANTED, NUMBERS)
    assert outcome.loss_sum.item() == pytest.approx(
        sum((VALUES[k] - WANTED[k]).item() ** 2 for k in range(6)), rel=1e-6
    )
    assert outcome.num_correct is None


@pytest.mark.parametrize(
    ("value", "targets", "form"),
    [(LOGITS, CLASSES, IMAGES), (TOKEN_LOGITS, IDS, TOKENS), (VALUES, WANTED, NUMBERS)],
    ids=["images", "tokens", "numbers"],
)
@pytest.mark.parametrize("cut", range(7))
def test_parts_add_up(value, targets, form, cut):
    whole = answer(value, targets, form)
    parts = [answer(value[part], targets[part], form) for part in (slice(cut), slice(cut, 6))]
    assert sum(part.loss_sum.item() for part in parts) == pytest.approx(whole.loss_sum.item(), rel=1e-6)
    if whole.num_correct is not None:
        assert sum(part.num_correct for part in parts) == whole.num_correct


def test_ignored_targets_count_for_nothing():
    targets = CLASSES.clone()
    targets[2:] = -100
    assert answer(LOGITS, targets, IMAGES).loss_sum == answer(LOGITS[:2], CLASSES[:2], IMAGES).loss_sum
    assert answer(LOGITS, targets, IMAGES).num_correct == answer(LOGITS[:2], CLASSES[:2], IMAGES).num_correct


def test_logits_of_an_object_and_extra_classes_are_accepted():
    class Output:
        logits = torch.cat([LOGITS, torch.full((6, 2), -1e9)], dim=1)

    assert answer(Output(), CLASSES, IMAGES).loss_sum == pytest.approx(answer(LOGITS, CLASSES, IMAGES).loss_sum)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_single(dtype):
    outcome = answer(LOGITS.to(dtype), CLASSES, IMAGES)
    assert outcome.loss_sum.dtype == torch.float32
    wanted = F.cross_entropy(LOGITS.to(dtype).float(), CLASSES, reduction="sum")
    assert outcome.loss_sum == wanted


def test_the_mask_reaches_the_model():
    mask, seen = torch.ones(6, 3), []

    def model(inputs, attention_mask):
        seen.append(attention_mask)
        return LOGITS

    compute_outcome(model, Batch(torch.zeros(6, 3), CLASSES, mask), IMAGES)
    assert seen[0] is mask


@pytest.mark.parametrize(
    ("value", "targets", "form", "words"),
    [
        ((LOGITS,), CLASSES, IMAGES, "the model returned tuple: it must return a tensor"),
        (
            LOGITS[:, :3],
            CLASSES,
            IMAGES,
            "shape (6, 3) for targets of shape (6,) and 4 classes: (6, 4) is required",
        ),
        (LOGITS[:5], CLASSES, IMAGES, "(5, 4)"),
        (torch.zeros(()), CLASSES, IMAGES, "shape ()"),
        (LOGITS, IDS, TOKENS, "(6, 5, 4) is required"),
        (LOGITS, WANTED, NUMBERS, "shape (6, 4) for 6 numbers: (6, 1) is required"),
    ],
)
def test_an_answer_of_another_shape_is_refused(value, targets, form, words):
    with pytest.raises(ConfigError) as caught:
        answer(value, targets, form)
    assert words in str(caught.value)


def layer(width=4):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


class Layer(nn.Module):
    """A layer with a list of experts inside."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([layer(), layer()])

    def forward(self, x):
        return sum(expert(x) for expert in self.experts)


class Encoder(nn.Module):
    def __init__(self, num_layers):
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(4))
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))


class Net(nn.Module):
    def __init__(self, num_layers=2):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(4))
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.encoder = Encoder(num_layers)
        self.act = nn.ReLU()
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 3)])


class Around(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def resnet_like():
    stages = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), nn.Sequential(layer(), layer()))
    return nn.Sequential(stages, nn.Linear(4, 2))


def shared():
    once = layer()
    return nn.Sequential(nn.Sequential(once, layer()), nn.Sequential(layer(), once), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (Net(), ["stem", "encoder.layers.0", "encoder.layers.1", "heads.0", "heads.1"]),
        (Net(1), ["stem", "encoder.layers.0", "heads.0", "heads.1"]),
        (
            Around(Net()),
            ["module.stem", "module.encoder.layers.0", "module.encoder.layers.1", "module.heads.0", "module.heads.1"],
        ),
        (layer(), ["0", "2"]),
        (Around(layer()), ["module.0", "module.2"]),
        (nn.Linear(2, 2), [""]),
        (Around(nn.Linear(2, 2)), ["module"]),
        (resnet_like(), ["0.0", "0.1.0", "0.1.1", "1"]),
        (shared(), ["0.0", "0.1", "1.0", "2"]),
        (nn.Sequential(Encoder(2), nn.Linear(4, 4)), ["0.layers.0", "0.layers.1", "1"]),
        (nn.ReLU(), [""]),
    ],
)
def test_the_blocks_have_the_expected_names(module, names):
    blocks = find_blocks(module)
    assert [name for name, _ in blocks] == names
    assert all(module.get_submodule(name) is block for name, block in blocks)


@pytest.mark.parametrize(
    ("name", "first", "last", "count"),
    [
        ("cnn", "0", "8", 4),
        ("resnet18", "stem", "head", 10),
        ("gpt2-tiny", "tokens", "norm", 7),
        ("linear", "0", "0", 1),
    ],
)
def test_the_blocks_of_the_built_in_models(name, first, last, count):
    options = ModelOptions()
    names = [block for block, _ in find_blocks(build_model(name, default_form(name), options))]
    assert (names[0], names[-1], len(names)) == (first, last, count)


def test_a_module_with_parameters_of_its_own_and_no_parts_is_one_block():
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(2))
    assert find_blocks(module) == [("", module)]


SIZE = {"layers": 2, "width": 32, "heads": 4, "vocabulary": 50, "context": 16, "num_classes": 0, "dropout": 0.0}


def build(**changes):
    torch.manual_seed(3)
    module = GPT2(**{**SIZE, **changes})
    with torch.no_grad():  # biases start at zero and norms at one, which would hide a swap
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def test_classes_are_read_at_the_last_token_before_the_padding():
    module = build(num_classes=3)
    ids = torch.randint(50, (2, 10))
    lengths = torch.tensor([6, 10])
    mask = (torch.arange(10) < lengths[:, None]).long()
    padded = torch.where(mask == 1, ids, 49)
    logits = module(padded, attention_mask=mask)
    assert logits.shape == (2, 3)
    torch.testing.assert_close(logits[:1], module(ids[:1, :6]))
    torch.testing.assert_close(logits[1:], module(ids[1:]))
    assert not torch.allclose(logits[:1], module(padded[:1]))
    torch.testing.assert_close(module(padded, attention_mask=mask.bool()), logits)


def test_a_sequence_longer_than_the_positions_is_refused():
    with pytest.raises(ConfigError, match=r"17 .*16"):
        build()(torch.zeros(1, 17, dtype=torch.long))
