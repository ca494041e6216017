"""Pairs of sentences and plain text: published files, token ids, blocks, and errors on damaged files."""

import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.workloads.data import DataForm, DataRequest
from paceline.workloads.data.formats import ByteTokenizer
from paceline.workloads.data.sets import load_data

HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
PAIRS = [('He said " no " .', '" No , " said he .', 1), ("It rained .", "It ’ s dry .", 0), ('"', 'Yes "" .', 1)]
TOKENIZER = ByteTokenizer()


def load(name, path, split="train", form=None, model_folder=None, **fields):
    return load_data(DataRequest(name=name, path=str(path), **fields), split, form, model_folder=model_folder)


def check_refused(name, path, code="data-file", **fields):
    """Loading fails with this code and a one-line message."""
    with pytest.raises(ConfigError) as caught:
        load(name, path, **fields)
    assert caught.value.code == code and "\n" not in str(caught.value)
    return str(caught.value)


def read_back(data, row):
    """The sentences encoded in a row of bytes."""
    ids = data.inputs[row, : data.lengths[row]].tolist()
    assert ids[-1] == TOKENIZER.end
    middle = ids.index(TOKENIZER.separator)
    return bytes(ids[:middle]).decode(), bytes(ids[middle + 1 : -1]).decode()


def write_pairs(folder, names=("msr_paraphrase_train.txt", "msr_paraphrase_test.txt"), lines=None, end="\n"):
    folder.mkdir(parents=True, exist_ok=True)
    lines = lines or [f"{label}\t7\t8\t{first}\t{second}" for first, second, label in PAIRS]
    for name in names:
        (folder / name).write_bytes((end.join([HEADER, *lines]) + end).encode("utf-8-sig"))
    return folder


@pytest.mark.parametrize(
    ("folder", "names", "end"),
    [
        (".", ("msr_paraphrase_train.txt", "msr_paraphrase_test.txt"), "\r\n"),
        (".", ("train.tsv", "dev.tsv"), "\n"),
        ("MRPC", ("train.tsv", "dev.tsv"), "\n"),
    ],
)
def test_quotes_are_plain_text_in_the_published_files(tmp_path, folder, names, end):
    write_pairs(tmp_path / folder, names, end=end)
    for split in ("train", "test"):
        data = load("mrpc", tmp_path, split)
        assert [read_back(data, row) for row in range(3)] == [pair[:2] for pair in PAIRS]
        assert data.targets.tolist() == [1, 0, 1]
    assert len(load("mrpc", tmp_path, samples=2)) == 2
    assert data.form == DataForm(kind="pairs", shape=(384,), num_classes=2, vocabulary=259, pad=256)


@pytest.mark.parametrize(
    ("lines", "value"),
    [
        (["1\t7\t8\ta\tb", "1\t7\t8\ta"], "line 3 has 4 fields"),
        (["1\t7\t8\ta\tb\tc"], "line 2 has 6 fields"),
        (["yes\t7\t8\ta\tb"], "'yes'"),
        (["1\t7\t8\ta\tb", "2\t7\t8\ta\tb"], "label 2 in row 1"),
    ],
)
def test_damaged_pairs_are_named(tmp_path, lines, value):
    found = check_refused("mrpc", write_pairs(tmp_path, lines=lines))
    assert found.startswith(str(tmp_path / "msr_paraphrase_train.txt")) and value in found


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b"", "['']"),
        (b"index\tsentence\n1\ta\n", "['index', 'sentence']"),
        (HEADER.encode() + b"\n", "0 samples"),
        (HEADER.encode() + b"\n1\t7\t8\t\xff\tb\n", "UnicodeDecodeError"),
    ],
)
def test_files_that_are_not_pairs(tmp_path, content, value):
    write_pairs(tmp_path)
    (tmp_path / "msr_paraphrase_train.txt").write_bytes(content)
    assert value in check_refused("mrpc", tmp_path)


@pytest.mark.parametrize(
    ("columns", "value"),
    [
        (None, ""),
        ({"sentence1": ["a"], "label": [1]}, '"sentence2"'),
        ({"sentence1": ["a"], "sentence2": [None], "label": [1]}, "column sentence2"),
        ({"sentence1": ["a"], "sentence2": ["b"], "label": [-1]}, "label -1 in row 0"),
    ],
)
def test_pairs_in_parquet(tmp_path, columns, value):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    good = dict(zip(("sentence1", "sentence2", "label"), map(list, zip(*PAIRS, strict=True)), strict=True))
    (tmp_path / "mrpc").mkdir()
    for split in ("train", "validation"):
        parquet.write_table(pyarrow.table(columns or good), tmp_path / f"mrpc/{split}-00000-of-00001.parquet")
    if value:
        assert value in check_refused("mrpc", tmp_path)
        return
    for split in ("train", "test"):
        data = load("mrpc", tmp_path, split)
        assert [read_back(data, row) for row in range(3)] == [pair[:2] for pair in PAIRS]


def test_padding_is_cut_to_the_longest_of_the_batch(tmp_path):
    data = load("mrpc", write_pairs(tmp_path))
    indices = torch.tensor([1, 2])
    batch = data.prepare(data.take(indices), indices, 0)
    lengths = data.lengths[indices].tolist()
    assert batch.inputs.shape == batch.mask.shape == (2, max(lengths)) and max(lengths) < data.lengths.max()
    assert batch.mask.sum(1).tolist() == lengths and batch.mask.dtype == torch.int64
    assert torch.equal(batch.inputs == TOKENIZER.pad, batch.mask == 0)
    assert batch.targets.tolist() == [0, 1]


@given(st.text(max_size=40), st.text(max_size=40), st.integers(4, 60))
@pytest.mark.slow
def test_pairs_fit_the_context_and_lose_no_more_than_they_must(first, second, context):
    (ids,) = TOKENIZER.encode_pairs([first], [second], context)
    left, right = first.encode(), second.encode()
    middle = ids.tolist().index(TOKENIZER.separator)
    assert len(ids) == min(context, len(left) + len(right) + 2) and ids[-1] == TOKENIZER.end
    assert left.startswith(bytes(ids[:middle].tolist())) and right.startswith(bytes(ids[middle + 1 : -1].tolist()))
    if len(ids) == context:
        assert min(middle, context - 2 - middle) >= min(len(left), len(right), (context - 2) // 2)


@pytest.mark.parametrize(
    ("wished", "context", "expected"), [(None, None, 384), (64, None, 384), (1024, None, 384), (64, 500, 500)]
)
def test_the_context_of_pairs(tmp_path, wished, context, expected):
    form = wished and DataForm(kind="tokens", shape=(wished,), num_classes=2, vocabulary=259)
    assert load("mrpc", write_pairs(tmp_path), form=form, context=context).form.shape == (expected,)


def test_text_is_cut_into_blocks_and_the_last_tenth_is_the_test(tmp_path):
    text = "".join(chr(97 + number % 26) for number in range(200))
    file = tmp_path / "a.txt"
    file.write_text(text)
    train, test = load("text", file, context=9), load("text", file, "test", context=9)
    indices = torch.arange(len(train))
    batch = train.prepare(train.take(indices), indices, 0)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.inputs.shape == (20, 9) and len(test) == 2  # 180 and 20 bytes, plus one end token each
    assert bytes(batch.inputs.flatten().tolist()).decode() == text[:180]
    assert bytes(batch.targets.flatten().tolist()[:-1]).decode() == text[1:180]
    assert batch.targets[-1, -1] == TOKENIZER.end
    assert bytes(test.take(torch.tensor([0])).inputs[0].tolist()).decode() == text[180:189]
    assert train.form == DataForm(kind="tokens", shape=(9,), num_classes=259, vocabulary=259, pad=256)
    assert len(load("text", file, context=9, samples=3)) == 3
    assert load("text", file, form=train.form).form.shape == (9,)


def test_a_folder_of_text_gives_both_splits_of_every_file(tmp_path):
    (tmp_path / "deep").mkdir()
    for name, letter in (("b.txt", "b"), ("a.txt", "a"), ("deep/c.txt", "c")):
        (tmp_path / name).write_text(letter * 100)
    (tmp_path / "other.md").write_text("z" * 100)
    for split, count in (("train", 90), ("test", 10)):
        data = load("text", tmp_path, split, context=1)
        ids = data.inputs[:, 0].tolist()
        assert [ids.count(ord(letter)) for letter in "abcz"] == [count, count, count, 0]
        assert ids.index(ord("b")) == count + 1 and ids[count] == TOKENIZER.end


def test_a_character_is_not_split_between_training_and_test(tmp_path):
    file = tmp_path / "a.txt"
    for length in range(20, 30):
        file.write_text("x" * length + "é" * length)
        test = load("text", file, "test", context=1)
        assert bytes(test.inputs[:, 0].tolist()).decode() == "é" * (len(test) // 2)


@pytest.mark.parametrize(("text", "split"), [("", "train"), ("abcde", "train"), ("abcdefghij" * 5, "test")])
def test_too_little_text(tmp_path, text, split):
    (tmp_path / "a.txt").write_text(text)
    check_refused("text", tmp_path / "a.txt", split=split, context=8)


@pytest.fixture
def fake_transformers(monkeypatch):
    """A library whose tokenizer maps each word to one id, its length."""

    class Words:
        eos_token_id, sep_token_id, pad_token_id = None, 31, None

        def __len__(self):
            return 32

        def __call__(self, text, second=None, **options):
            if second is None:
                return {"input_ids": [len(word) for word in text.split()]}
            assert options == {"truncation": True, "max_length": options["max_length"]}
            rows = [self(a)["input_ids"] + [31] + self(b)["input_ids"] for a, b in zip(text, second, strict=True)]
            return {"input_ids": [row[: options["max_length"]] for row in rows]}

    def from_pretrained(folder, local_files_only):
        assert local_files_only
        if folder.endswith("broken"):
            raise OSError("no such\ntokenizer")
        return Words()

    module = types.SimpleNamespace(AutoTokenizer=types.SimpleNamespace(from_pretrained=from_pretrained))
    monkeypatch.setitem(sys.modules, "transformers", module)
    monkeypatch.setattr("paceline.workloads.data.find_spec", lambda name: name)


def test_a_tokenizer_from_a_folder(tmp_path, fake_transformers):
    folder = tmp_path / "model"
    folder.mkdir()
    write_pairs(tmp_path)
    bytes_first = load("mrpc", tmp_path, model_folder=str(folder))  # the folder has no tokenizer yet
    assert bytes_first.form.vocabulary == 259
    (folder / "tokenizer.json").write_text("{}")
    own = load("mrpc", tmp_path, model_folder=str(folder))
    asked = load("mrpc", tmp_path, tokenizer=str(folder))
    assert own.inputs.tolist() == asked.inputs.tolist() and "tokenized by model" in own.describe()
    assert own.form == DataForm(kind="pairs", shape=(128,), num_classes=2, vocabulary=32, pad=31)
    assert own.inputs[1, : own.lengths[1]].tolist() == [2, 6, 1, 31, 2, 1, 1, 3, 1]
    assert load("mrpc", tmp_path, model_folder=str(folder), tokenizer="bytes").form.vocabulary == 259
    assert load("mrpc", tmp_path, tokenizer=str(folder), context=4).lengths.max() == 4
    (tmp_path / "a.txt").write_text("one three seventy " * 20)
    text = load("text", tmp_path / "a.txt", tokenizer=str(folder), context=2)
    assert text.take(torch.tensor([0])).inputs.tolist() == [[3, 5]]


def test_tokenizers_that_cannot_be_loaded(tmp_path, fake_transformers, monkeypatch):
    write_pairs(tmp_path)
    (tmp_path / "broken").mkdir()
    found = check_refused("mrpc", tmp_path, "tokenizer", tokenizer=str(tmp_path / "broken"))
    assert "broken (no such tokenizer)" in found
    monkeypatch.setattr("paceline.workloads.data.find_spec", lambda name: None)
    assert "paceline[hf]" in check_refused("mrpc", tmp_path, "tokenizer", tokenizer=str(tmp_path / "broken"))


def test_bytes_are_their_own_ids():
    assert TOKENIZER.encode("aé".encode()).tolist() == [97, 195, 169]
    assert TOKENIZER.encode(b"").dtype == np.int32
    with pytest.raises(ConfigError, match="--context 3"):
        TOKENIZER.encode_pairs(["a"], ["b"], 3)
