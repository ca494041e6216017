"""In-memory data: rows by index, normalized on the device, and augmented by seed, epoch and index only."""

import pytest
import torch
import torch.nn.functional as F

from paceline.workloads.data import DataForm, DataRequest
from paceline.workloads.data.sets import Augmentation, ImageData, build_synthetic

COUNT, SIZE = 40, 12


def build_images(count=COUNT, **fields):
    generator = torch.Generator().manual_seed(3)
    return ImageData(
        name="test", form=DataForm(kind="images", shape=(3, SIZE, SIZE), num_classes=10), split="train", source="made",
        inputs=torch.randint(256, (count, 3, SIZE, SIZE), generator=generator, dtype=torch.uint8),
        targets=torch.arange(count) % 10, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3), **fields,
    )  # fmt: skip


def prepared(data, indices, epoch):
    indices = torch.as_tensor(indices)
    return data.prepare(data.take(indices), indices, epoch).inputs


def test_rows_come_by_index_as_bytes():
    data = build_images()
    batch = data.take(torch.tensor([7, 0, 7]))
    assert batch.inputs.dtype == torch.uint8
    assert torch.equal(batch.inputs, data.inputs[[7, 0, 7]]) and batch.targets.tolist() == [7, 0, 7]


def test_images_are_normalized_by_channel():
    data = build_images()
    mean, std = torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1), torch.tensor([0.2, 0.25, 0.3]).view(3, 1, 1)
    expected = (data.inputs[:5] / 255 - mean) / std
    torch.testing.assert_close(prepared(data, range(5), 0), expected)
    assert torch.equal(prepared(data, range(5), 0), prepared(data, range(5), 9))


@pytest.mark.parametrize("flip", [False, True])
def test_a_crop_is_that_of_the_mirrored_image(flip):
    images = build_images().inputs
    augmentation = Augmentation(pad=4, flip=flip, seed=1)
    draws = augmentation.draw(COUNT, 0)
    found = augmentation.apply(images, draws)
    wide = F.pad(images.float(), (4, 4, 4, 4), mode="reflect").to(torch.uint8)
    for image, padded, (down, right, mirrored) in zip(found, wide, draws.tolist(), strict=True):
        crop = padded[:, 4 + down : 4 + down + SIZE, 4 + right : 4 + right + SIZE]
        assert torch.equal(image, crop.flip(2) if mirrored else crop)


def test_draws_reach_every_shift_and_flip_half():
    draws = Augmentation(pad=2, flip=True, seed=0).draw(2000, 0)
    assert {tuple(row[:2]) for row in draws.tolist()} == {(y, x) for y in range(-2, 3) for x in range(-2, 3)}
    assert 800 < int(draws[:, 2].sum()) < 1200
    assert not Augmentation(pad=2, flip=False, seed=0).draw(2000, 0)[:, 2].any()


def test_a_samples_augmentation_does_not_depend_on_its_batch():
    whole = prepared(build_images(augmentation=Augmentation(4, True, 5)), range(COUNT), 2)
    resumed = build_images(augmentation=Augmentation(4, True, 5))
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(0))
    for rows in order.split(7):
        assert torch.equal(prepared(resumed, rows, 2), whole[rows])
    back = build_images(augmentation=Augmentation(4, True, 5))
    prepared(back, range(COUNT), 3)
    assert torch.equal(prepared(back, range(COUNT), 2), whole)


def test_epochs_and_seeds_differ():
    data, other = (build_images(augmentation=Augmentation(4, True, seed)) for seed in (5, 6))
    first = prepared(data, range(COUNT), 0)
    for another in (prepared(data, range(COUNT), 1), prepared(other, range(COUNT), 0)):
        assert (first != another).flatten(1).any(dim=1).sum() > COUNT // 2


def test_describes_itself_in_one_line():
    assert build_images().describe() == "test, train: 40 images of 3 x 12 x 12 in 10 classes, made"


@pytest.mark.parametrize("kind", ["images", "numbers", "tokens", "pairs"])
def test_the_first_samples_of_a_set_are_those_of_the_whole(kind):
    whole = build_synthetic(DataRequest(name=f"synthetic:{kind}"), "test")
    few = whole.first(5)
    indices = torch.arange(5)
    assert len(few) == 5 and len(whole) == 512 and len(whole.first(1000)) == 512
    assert torch.equal(few.take(indices).inputs, whole.take(indices).inputs)
    assert torch.equal(few.take(indices).targets, whole.take(indices).targets)


def test_a_set_has_a_checksum_of_all_its_samples():
    one, same = (build_synthetic(DataRequest(name="synthetic:images", samples=8, seed=1), "train") for _ in range(2))
    other = build_synthetic(DataRequest(name="synthetic:images", samples=8, seed=2), "train")
    assert one.checksum == same.checksum != other.checksum
    assert one.first(7).checksum != one.checksum


def test_a_cutout_hides_one_square_and_nothing_else():
    augmentation = Augmentation(0, False, 3, cutout=4)
    whole, cut = build_images(augmentation=Augmentation(0, False, 3)), build_images(augmentation=augmentation)
    before, after = prepared(whole, range(COUNT), 0), prepared(cut, range(COUNT), 0)
    hidden = (before != after).any(dim=1)
    for image, mask in zip(after, hidden, strict=True):
        rows, columns = mask.any(dim=1).nonzero().flatten(), mask.any(dim=0).nonzero().flatten()
        # At an edge, part of the square lies outside the image.
        assert 2 <= len(rows) <= 4 and 2 <= len(columns) <= 4
        assert not image[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].any()
    assert len({tuple(mask.flatten().tolist()) for mask in hidden}) > COUNT // 4
    assert torch.equal(prepared(cut, range(COUNT), 0), after)
    assert not torch.equal(prepared(cut, range(COUNT), 1), after)
