"""Image files in their published formats and one error type for damaged files."""

import gzip
import io
import os
import pickle
import struct
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.errors import ConfigError
from paceline.workloads.data import DataRequest
from paceline.workloads.data.sets import load_data

COUNT = 6
GZIP = b"\x1f\x8b"


def load(name, path, split="train", **fields):
    return load_data(DataRequest(name=name, path=str(path), **fields), split)


def check_refused(name, path, code="data-file", file=None, **fields):
    """Loading fails with this code and a one-line message that starts with the offending file."""
    with pytest.raises(ConfigError) as caught:
        load(name, path, **fields)
    text = str(caught.value)
    assert caught.value.code == code and "\n" not in text
    assert file is None or text.startswith(f"{file}: ")
    return text


def idx_bytes(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def build_digits(seed, count=COUNT):
    draw = np.random.default_rng(seed)
    return draw.integers(256, size=(count, 28, 28), dtype=np.uint8), draw.integers(10, size=count, dtype=np.uint8)


@pytest.fixture
def mnist(tmp_path):
    """A folder with MNIST's four files and their contents."""

    def write(separator="-", packed=False, folder="."):
        target = tmp_path / folder
        target.mkdir(parents=True, exist_ok=True)
        content = {}
        for prefix, split, seed in (("train", "train", 0), ("t10k", "test", 1)):
            content[split] = build_digits(seed)
            for what, form, array in zip(("images", "labels"), ("idx3", "idx1"), content[split], strict=True):
                data = idx_bytes(array)
                file = target / f"{prefix}-{what}{separator}{form}-ubyte{'.gz' if packed else ''}"
                file.write_bytes(gzip.compress(data) if packed else data)
        return tmp_path, content

    return write


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("mnist", {}),
        ("mnist", {"packed": True}),
        ("fashion-mnist", {"separator": "."}),
        ("mnist", {"folder": "MNIST/raw"}),
        ("fashion-mnist", {"folder": "FashionMNIST/raw", "packed": True}),
    ],
)
def test_idx_files_in_every_layout(mnist, name, layout):
    folder, content = mnist(**layout)
    for split, (images, labels) in content.items():
        data = load(name, folder, split)
        assert data.inputs.numpy().tolist() == images[:, None].tolist() and data.targets.tolist() == labels.tolist()
        assert data.form.shape == (1, 28, 28) and data.form.num_classes == 10 and len(data) == COUNT
    assert load(name, folder, samples=2).targets.tolist() == content["train"][1][:2].tolist()


def write_damaged(folder, damage):
    images, labels = build_digits(0)
    files = {"images-idx3": idx_bytes(images), "labels-idx1": idx_bytes(labels)}
    for prefix in ("train", "t10k"):
        for what, data in {**files, **damage}.items():
            packed = data[:2] == GZIP
            (folder / f"{prefix}-{what}-ubyte{'.gz' if packed else ''}").write_bytes(data)


IMAGES, LABELS = build_digits(0)


@pytest.mark.parametrize(
    ("damage", "value"),
    [
        ({"images-idx3": idx_bytes(IMAGES)[:-5]}, "(6,28,28)"),
        ({"images-idx3": idx_bytes(IMAGES) + b"x"}, "(6,28,28)"),
        ({"images-idx3": idx_bytes(IMAGES)[:9]}, ""),
        ({"images-idx3": idx_bytes(LABELS)}, "00000801"),
        ({"labels-idx1": b""}, "missing"),
        ({"images-idx3": gzip.compress(idx_bytes(IMAGES))[:-900]}, "EOFError"),
        ({"labels-idx1": idx_bytes(LABELS[:4])}, "4 labels for 6"),
        ({"labels-idx1": idx_bytes(LABELS * 0 + 11)}, "label 11 in row 0"),
    ],
)
def test_damaged_idx_files_are_named(tmp_path, damage, value):
    write_damaged(tmp_path, damage)
    ((what, data),) = damage.items()
    file = tmp_path / f"train-{what}-ubyte{'.gz' if data[:2] == GZIP else ''}"
    assert value in check_refused("mnist", tmp_path, file=file)


def test_more_samples_than_there_are(mnist):
    folder, _ = mnist()
    check_refused("mnist", folder, "samples", samples=7)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_read_permission(mnist):
    folder, _ = mnist()
    (folder / "train-images-idx3-ubyte").chmod(0)
    assert "PermissionError" in check_refused("mnist", folder)


def build_batch(seed, count=COUNT):
    draw = np.random.default_rng(seed)
    return draw.integers(256, size=(count, 3072), dtype=np.uint8), draw.integers(10, size=count).tolist()


NAMES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def write_batches(folder):
    folder.mkdir(parents=True, exist_ok=True)
    content = {}
    for seed, name in enumerate(NAMES):
        images, labels = content[name] = build_batch(seed)
        entries = {b"data": images, b"labels": labels, b"batch_label": name.encode()}
        (folder / name).write_bytes(pickle.dumps(entries, protocol=4))
    return content


def pack(folder, archive):
    with tarfile.open(archive, "w:gz") as tar:
        for name in NAMES:
            tar.add(folder / name, f"cifar-10-batches-py/{name}")
    return archive


def check_cifar(path, content):
    train, test = load("cifar10", path), load("cifar10", path, "test")
    expected = np.concatenate([content[name][0] for name in NAMES[:5]]).reshape(-1, 3, 32, 32)
    assert np.array_equal(train.inputs.numpy(), expected)
    assert train.targets.tolist() == [label for name in NAMES[:5] for label in content[name][1]]
    assert np.array_equal(test.inputs.numpy(), content["test_batch"][0].reshape(-1, 3, 32, 32))


def test_cifar_batches_in_a_folder(tmp_path):
    content = write_batches(tmp_path / "cifar-10-batches-py")
    check_cifar(tmp_path, content)
    check_cifar(tmp_path / "cifar-10-batches-py", content)


@pytest.mark.filterwarnings("error")
def test_a_batch_as_python_2_wrote_it():
    """The published archive contains numpy 1 module names and Python 2 strings."""
    from paceline.workloads.data.formats import _parse_batch

    row = bytes(range(256)) * 12
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR(K\x01(K\x01M\x00\x0ct"
        b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tbI00\n"
        b"T" + struct.pack("<i", len(row)) + row + b"tb"
    )
    images, labels = _parse_batch(b"\x80\x02}(U\x04data" + array + b"U\x06labels](K\x07eu.")
    assert images.shape == (1, 3, 32, 32) and images.tobytes() == row and labels.tolist() == [7]


def test_cifar_in_its_archive(tmp_path):
    content = write_batches(tmp_path / "unpacked")
    archive = pack(tmp_path / "unpacked", tmp_path / "cifar-10-python.tar.gz")
    check_cifar(archive, content)
    check_cifar(tmp_path, content)


def test_a_damaged_archive(tmp_path):
    write_batches(tmp_path / "unpacked")
    archive = pack(tmp_path / "unpacked", tmp_path / "cifar-10-python.tar.gz")
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    check_refused("cifar10", archive, file=archive)
    archive.write_bytes(b"not an archive")
    check_refused("cifar10", archive, file=archive)
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "unpacked" / "data_batch_2", "x/data_batch_2")
    assert "contains data_batch_2, but" in check_refused("cifar10", archive, file=archive)


class Caller:
    """An object that calls `function` when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("keep", ["in the place of all", "with good data"])
@pytest.mark.parametrize("function", [os.mkdir, eval, getattr])
def test_a_pickle_that_calls_is_refused_and_calls_nothing(tmp_path, function, keep):
    folder, made = tmp_path / "batches", tmp_path / "made"
    write_batches(folder)
    trap = {
        os.mkdir: Caller(os.mkdir, str(made)),
        eval: Caller(eval, f"__import__('os').mkdir({str(made)!r})"),
        getattr: Caller(getattr, np.empty(0), "tofile"),
    }[function]
    content = trap if keep == "in the place of all" else {**pickle.loads((folder / NAMES[0]).read_bytes()), "x": trap}
    (folder / NAMES[0]).write_bytes(pickle.dumps(content, protocol=2))
    found = check_refused("cifar10", folder, file=folder / NAMES[0])
    assert not made.exists()
    assert "refused: the pickle loads " in found
    if keep == "in the place of all":
        assert function.__name__ in found


@pytest.mark.parametrize(
    ("batch", "value"),
    [
        (None, "EOFError"),
        ([1, 2], "TypeError"),
        ({b"labels": [1]}, "b'data'"),
        ({b"data": np.zeros((2, 9), np.uint8), b"labels": [1, 1]}, "(3,32,32)"),
        ({b"data": np.zeros((1, 3072)), b"labels": [1]}, "float64"),
        ({b"data": build_batch(0)[0], b"labels": [1, 2]}, "2 labels for 6"),
        ({b"data": build_batch(0)[0], b"labels": [0] * 5 + [10]}, "label 10 in row 5"),
    ],
)
def test_damaged_batches_are_named(tmp_path, batch, value):
    write_batches(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(b"" if batch is None else pickle.dumps(batch, protocol=4))
    assert value in check_refused("cifar10", tmp_path, file=tmp_path / "data_batch_1")


def test_a_missing_batch_is_named(tmp_path):
    write_batches(tmp_path)
    (tmp_path / "data_batch_4").unlink()
    assert "has no data_batch_4 " in check_refused("cifar10", tmp_path, "no-files")


def picture(pixels, form="PNG"):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, form)
    return {"bytes": stream.getvalue(), "path": None}


def write_parquet(path, columns):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path)


COLORS = np.random.default_rng(0).integers(256, size=(5, 8, 8, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("name", "column", "files"),
    [
        ("cifar10", "img", {"train.parquet": slice(0, 3), "test.parquet": slice(3, 5)}),
        (
            "cifar10",
            "img",
            {
                "plain_text/train-00000-of-00002.parquet": slice(0, 2),
                "plain_text/train-00001-of-00002.parquet": slice(2, 3),
                "plain_text/test-00000-of-00001.parquet": slice(3, 5),
            },
        ),
        (
            "mnist",
            "image",
            {
                "mnist/train-00000-of-00001.parquet": slice(0, 3),
                "mnist/test-00000-of-00001.parquet": slice(3, 5),
            },
        ),
    ],
)
def test_images_in_parquet(tmp_path, name, column, files):
    pixels = COLORS if name == "cifar10" else COLORS[:, :, :, 0]
    for file, rows in files.items():
        labels = list(range(5))[rows]
        write_parquet(tmp_path / file, {column: [picture(image) for image in pixels[rows]], "label": labels})
    train, test = load(name, tmp_path), load(name, tmp_path, "test")
    expected = pixels.transpose(0, 3, 1, 2) if name == "cifar10" else pixels[:, None]
    assert np.array_equal(train.inputs.numpy(), expected[:3]) and train.targets.tolist() == [0, 1, 2]
    assert np.array_equal(test.inputs.numpy(), expected[3:]) and test.targets.tolist() == [3, 4]
    assert load(name, tmp_path, samples=1).targets.tolist() == [0]
    check_refused(name, tmp_path, "samples", samples=4)


def test_jpeg_is_decoded(tmp_path):
    flat = np.full((32, 32, 3), (200, 100, 50), np.uint8)
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", {"img": [picture(flat, "JPEG")], "label": [3]})
    data = load("cifar10", tmp_path)
    assert (data.inputs[0].float() - torch.tensor([200.0, 100.0, 50.0])[:, None, None]).abs().max() < 4


@pytest.mark.parametrize(
    ("columns", "value"),
    [
        ({"pixels": [1], "label": [1]}, '"img"'),
        ({"img": [picture(COLORS[0])], "fine": [1]}, '"label"'),
        ({"img": [{"bytes": b"no", "path": None}], "label": [1]}, "UnidentifiedImageError"),
        ({"img": [picture(COLORS[0])], "label": [12]}, "label 12 in row 0"),
        ({"img": [picture(COLORS[0])], "label": [None]}, "column label"),
        ({"img": [picture(COLORS[0]), picture(COLORS[0, :4])], "label": [1, 1]}, "shape"),
        ({"img": [], "label": []}, ""),
    ],
)
def test_bad_parquet_files_are_named(tmp_path, columns, value):
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", columns)
    assert value in check_refused("cifar10", tmp_path, file=tmp_path / "train.parquet")


def test_a_truncated_parquet_file(tmp_path):
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", {"img": [picture(COLORS[0])], "label": [1]})
    whole = (tmp_path / "train.parquet").read_bytes()
    (tmp_path / "train.parquet").write_bytes(whole[:-20])
    check_refused("cifar10", tmp_path, file=tmp_path / "train.parquet")


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    (tmp_path / "train.parquet").write_bytes(b"")
    monkeypatch.setattr("paceline.workloads.data.find_spec", lambda name: None)
    check_refused("cifar10", tmp_path, "no-hf", tmp_path / "train.parquet")


def test_training_images_of_cifar_are_augmented_by_default(mnist, tmp_path):
    write_batches(tmp_path)
    usual, plain = load("cifar10", tmp_path), load("cifar10", tmp_path, augment=False)
    assert usual.augmentation == load("cifar10", tmp_path, augment=True).augmentation is not None
    assert (usual.augmentation.pad, usual.augmentation.flip) == (4, True)
    assert plain.augmentation is None and load("cifar10", tmp_path, "test", augment=True).augmentation is None
    folder, _ = mnist()
    assert load("mnist", folder).augmentation is None
    assert load("mnist", folder, augment=True).augmentation.flip is False
