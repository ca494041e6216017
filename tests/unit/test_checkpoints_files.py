"""Tensor files: other readers can read them, and a false header is refused before tensors are allocated."""

import json
import mmap
import zlib

import pytest
import safetensors.torch
import torch

from paceline.errors import ConfigError, RecordError
from paceline.training import checkpoint_files
from paceline.training.checkpoint_files import (
    _INVALID,
    MANIFEST,
    TensorBuffer,
    check_fingerprint,
    export_weights,
    fingerprint,
    save_folder,
)

TENSORS = {
    "float": torch.randn(3, 5), "double": torch.randn(2, dtype=torch.float64), "bf": torch.randn(7).bfloat16(),
    "half": torch.randn(3).half(), "bool": torch.tensor([True, False, True]), "byte": torch.arange(5).byte(),
    "long": torch.arange(4), "scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "turned": torch.randn(4, 6).t(),
    "strided": torch.randn(10)[::3], "channels": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "expanded": torch.ones(1).expand(5), "complex": torch.randn(3, dtype=torch.complex64), "ünï": torch.ones(1),
    "small": torch.arange(3, dtype=torch.int8), "unsigned": torch.tensor([2**60], dtype=torch.uint64),
}  # fmt: skip


def save_tensors(path, tensors, metadata=()):
    path.write_bytes(TensorBuffer().fill(tensors, dict(metadata)))
    return path


def load_tensors(path):
    with path.open("rb") as file:
        return checkpoint_files.load_tensors(file)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("tensors", [TENSORS, {}, {"one": torch.ones(1).bool()}], ids=["many", "none", "one byte"])
def test_our_files_are_read_by_safetensors_and_by_us(tmp_path, tensors):
    path = save_tensors(tmp_path / "a", tensors, {"format": "pt"})
    assert_equal(safetensors.torch.load_file(path), tensors)
    assert_equal(load_tensors(path), tensors)


def test_files_of_safetensors_are_read_by_us(tmp_path):
    tensors = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    safetensors.torch.save_file(tensors, tmp_path / "a", {"format": "pt"})
    assert_equal(load_tensors(tmp_path / "a"), tensors)


def test_a_buffer_is_filled_again_without_a_new_one():
    buffer = TensorBuffer()
    buffer.fill({"a": torch.zeros(100)}, {})
    place = buffer._buffer.data_ptr()
    assert bytes(buffer.fill({"a": torch.ones(90)}, {})) == bytes(TensorBuffer().fill({"a": torch.ones(90)}, {}))
    assert buffer._buffer.data_ptr() == place
    assert len(buffer.fill({"a": torch.ones(1000)}, {})) > 4000


def test_a_type_that_the_format_lacks_is_named():
    with pytest.raises(ConfigError, match=r"'z' .*torch.complex128"):
        TensorBuffer().fill({"z": torch.ones(1, dtype=torch.complex128)}, {})


def test_the_name_of_the_metadata_is_refused_for_a_tensor():
    with pytest.raises(ConfigError, match="'__metadata__'"):
        TensorBuffer().fill({"__metadata__": torch.ones(1)}, {"format": "pt"})


def entry(start, end, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HEADERS = {
    "beyond the end": {"a": entry(0, 4_000_000, [1_000_000])},
    "overlapping": {"a": entry(0, 8, [2]), "b": entry(4, 8, [1])},
    "a hole": {"a": entry(0, 2, [1], "F16"), "b": entry(4, 8, [1])},
    "a smaller size": {"a": entry(0, 8, [1])},
    "unseen bytes": {"a": entry(0, 4, [1])},
    "negative": {"a": entry(-4, 8, [3])},
    "turned round": {"a": entry(8, 0, [2])},
    "a larger size": {"a": entry(0, 8, [3])},
    "negative shape": {"a": entry(0, 8, [-1, -2])},
    "half a shape": {"a": entry(0, 8, [0.5, 4])},
    "unknown type": {"a": entry(0, 8, [2], "PICKLE")},
    "no offsets": {"a": {"dtype": "F32", "shape": [2]}},
    "a word": {"a": "b"},
    "a list": [],
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS.keys())
def test_a_false_header_is_refused(tmp_path, header):
    text = json.dumps(header).encode()
    (tmp_path / "a").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(_INVALID):
        load_tensors(tmp_path / "a")


@pytest.mark.parametrize(
    "content",
    [b"", b"\x01", (2**63).to_bytes(8, "little") + b"{}", (3).to_bytes(8, "little") + b"{}", bytes(8),
     (2).to_bytes(8, "little") + b"\xff\xff", (100_000).to_bytes(8, "little") + b"[" * 100_000,
     (66).to_bytes(8, "little") + b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{},"b":0}'],
)  # fmt: skip
def test_a_file_without_a_valid_header_is_refused(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(_INVALID):
        load_tensors(tmp_path / "a")


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5)
        self.head.weight = self.embed.weight


def test_exported_weights_load_into_the_model(tmp_path):
    model, other = Tied(), Tied()
    export_weights(tmp_path / "w", model.state_dict())
    assert safetensors.torch.load_file(tmp_path / "w").keys() == {"embed.weight", "head.bias"}
    safetensors.torch.load_model(other, tmp_path / "w")
    assert_equal(other.state_dict(), model.state_dict())


def test_export_never_overwrites_and_leaves_nothing_behind(tmp_path):
    export_weights(tmp_path / "w", {"a": torch.ones(2)})
    before = (tmp_path / "w").read_bytes()
    with pytest.raises(RecordError, match="never overwritten"):
        export_weights(tmp_path / "w", {"a": torch.zeros(2)})
    assert [path.name for path in tmp_path.iterdir()] == ["w"] and (tmp_path / "w").read_bytes() == before


def test_a_state_that_is_not_a_tensor_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"'extra'.*dict"):
        export_weights(tmp_path / "w", {"extra": {}})


def test_another_model_is_described_by_its_first_differences():
    here = fingerprint({f"l{i}": torch.ones(2, 3) for i in range(6)})
    there = fingerprint({"l0": torch.ones(2, 4), "l5": torch.ones(2, 3), "x": torch.ones(1)})
    check_fingerprint(here, dict(reversed(here.items())), "it")
    with pytest.raises(ConfigError) as caught:
        check_fingerprint(there, here, "checkpoint c")
    assert str(caught.value).startswith(
        "checkpoint c belongs to another model: 6 tensors differ (l0 is float32 [2, 4] and should be float32 [2, 3], "
        "l1 is missing and should be float32 [2, 3], l2 is missing and should be float32 [2, 3], ...): "
    )


@pytest.mark.parametrize("start", [0, 1])
def test_a_large_file_is_complete_with_and_without_the_page_cache(tmp_path, start):
    """Reading may start at a page boundary but not one byte after it; nor is the length a whole number of pages."""
    memory = mmap.mmap(-1, 10 * 2**20)
    memory.write(bytes(range(256)) * (10 * 2**12))
    data = memoryview(memory)[start : start + 9 * 2**20 + 123]
    save_folder(tmp_path / "folder", {"large": data, "small": b"few"})
    assert (tmp_path / "folder" / "large").read_bytes() == bytes(data)
    listed = json.loads((tmp_path / "folder" / MANIFEST).read_bytes())["files"]["large"]
    assert listed == {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
