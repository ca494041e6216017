"""Losses as sums over targets: they add up over parts of a batch, and say no to a model of another shape."""

import pytest
import torch
import torch.nn.functional as F

from paceline.errors import ConfigError
from paceline.workloads.data import IGNORED, Batch, DataForm
from paceline.workloads.models import compute_outcome

IMAGES = DataForm(kind="images", shape=(3,), num_classes=4)
TOKENS = DataForm(kind="tokens", shape=(5,), num_classes=4, vocabulary=4)
NUMBERS = DataForm(kind="numbers", shape=(3,), num_classes=0)
DRAW = torch.Generator().manual_seed(1)
LOGITS, CLASSES = torch.randn(6, 4, generator=DRAW), torch.randint(4, (6,), generator=DRAW)
TOKEN_LOGITS, IDS = torch.randn(6, 5, 4, generator=DRAW), torch.randint(4, (6, 5), generator=DRAW)
VALUES, WANTED = torch.randn(6, 1, generator=DRAW), torch.randn(6, 1, generator=DRAW)


def answer(value, targets, form, mask=None):
    """The outcome of a model that gives this answer, whatever the inputs."""
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
    """A column against a row would broadcast to 36 errors."""
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
    targets[2:] = IGNORED
    assert answer(LOGITS, targets, IMAGES).loss_sum == answer(LOGITS[:2], CLASSES[:2], IMAGES).loss_sum
    assert answer(LOGITS, targets, IMAGES).num_correct == answer(LOGITS[:2], CLASSES[:2], IMAGES).num_correct


def test_logits_of_an_object_and_classes_to_spare_are_taken():
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
        (LOGITS[:, :3], CLASSES, IMAGES, "the shape (6, 3) for targets of shape (6,) and 4 classes: (6, 4) is needed"),
        (LOGITS[:5], CLASSES, IMAGES, "(5, 4)"),
        (torch.zeros(()), CLASSES, IMAGES, "the shape ()"),
        (LOGITS, IDS, TOKENS, "(6, 5, 4) is needed"),
        (LOGITS, WANTED, NUMBERS, "the shape (6, 4) for 6 numbers: (6, 1) is needed"),
    ],
)
def test_an_answer_of_another_shape_is_refused(value, targets, form, words):
    with pytest.raises(ConfigError) as caught:
        answer(value, targets, form)
    assert words in str(caught.value)
