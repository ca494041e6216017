"""transformers models: sources, refusals, and our GPT-2 compared with theirs."""

import importlib.util
import io
import json
import os
import re
import sys
import urllib.request
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from paceline.errors import ConfigError
from paceline.workloads import external
from paceline.workloads.data import DataForm
from paceline.workloads.models import GPT2, find_blocks
from paceline.workloads.registry import ModelOptions, build_model, check_model, default_form, describe_model

from .test_models import build as build_gpt2

PLAIN = ModelOptions()
KEPT = "HuggingFaceTB/SmolLM2-360M-Instruct"
TOKENS = DataForm(kind="tokens", shape=(12,), num_classes=60, vocabulary=60)
PAIRS = DataForm(kind="pairs", shape=(12,), num_classes=3, vocabulary=60, pad=59)
LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 40, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
BERT = {
    "model_type": "bert", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64,
    "num_attention_heads": 4, "max_position_embeddings": 40, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


# Parts of a parameter's name here and in the files that Hugging Face distributes.
THEIR_NAMES = (
    (r"^tokens\.", "wte."),
    (r"^positions\.", "wpe."),
    (r"^blocks\.", "h."),
    (r"^norm\.", "ln_f."),
    (r"\.norm1\.", ".ln_1."),
    (r"\.norm2\.", ".ln_2."),
    (r"\.attention\.qkv\.", ".attn.c_attn."),
    (r"\.attention\.project\.", ".attn.c_proj."),
    (r"\.mlp\.0\.", ".mlp.c_fc."),
    (r"\.mlp\.2\.", ".mlp.c_proj."),
)
TRANSPOSED = re.compile(r"\.c_(attn|proj|fc)\.weight$")


def rename(name: str) -> str:
    for here, there in THEIR_NAMES:
        name = re.sub(here, there, name)
    return "score.weight" if name == "classes.weight" else f"transformer.{name}"


def export_state(module: GPT2) -> dict[str, torch.Tensor]:
    """The parameters with the names and transposed matrices of `transformers`' GPT-2."""
    state = {rename(name): tensor.detach() for name, tensor in module.named_parameters()}
    return {name: tensor.t() if TRANSPOSED.search(name) else tensor for name, tensor in state.items()}


@pytest.fixture(autouse=True)
def nothing_is_remembered():
    external._find_source.cache_clear()
    yield
    external._find_source.cache_clear()


@pytest.fixture
def transformers(monkeypatch):
    """The library, without access to the hub."""
    found = pytest.importorskip("transformers")
    monkeypatch.setattr(importlib.import_module("huggingface_hub"), "snapshot_download", refuse)
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_: io.BytesIO())
    return found


def refuse(**options):
    raise OSError("no way to the hub")


def write_config(folder, **fields):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def write_files(folder, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def look_back(module, changed_at=7):
    """The positions of logits that differ after changing one token."""
    ids = torch.arange(12).reshape(1, 12)
    other = ids.clone()
    other[0, changed_at] = 33
    with torch.no_grad():
        return (module(ids).logits != module(other).logits).any(dim=-1)[0].nonzero().flatten().tolist()


# Requests refused without importing transformers


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "hf: has no name"),
        ("./nowhere", "model folder nowhere does not exist: pass a folder with config.json"),
        ("a/b/c", "model folder a/b/c does not exist"),
        ("EMPTY", "has no config.json"),
    ],
)
def test_a_bad_source_is_refused(tmp_path, name, words):
    name = str(tmp_path) if name == "EMPTY" else name
    with pytest.raises(ConfigError, match=words):
        check_model(f"hf:{name}", PLAIN)


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"hf:gpt2 .*paceline\[hf\]"):
        check_model("hf:gpt2", PLAIN)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (("model.safetensors",), "weights from"),
        ((), "random weights, because .* holds only a configuration"),
        (("pytorch_model.bin",), "a pickle .pytorch_model.bin., which can run code"),
        (("pytorch_model.bin", "model.safetensors"), "weights from"),
        (("shards",), "lacks model-00002-of-00002.safetensors, listed in model.safetensors.index.json"),
        (("model.safetensors.index.json",), "index.json is damaged"),
    ],
)
def test_what_a_folder_holds(tmp_path, files, words):
    folder = write_files(write_config(tmp_path, **LLAMA), *(file for file in files if file != "shards"))
    if "shards" in files:
        shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": shards[0], "b": shards[1]}})
        )
        write_files(folder, shards[0])
    try:
        received = external.describe_weights(str(folder))
    except ConfigError as error:
        received = str(error)
    assert re.search(words, received), received


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """`hub(cached=..., fetched=...)`: results of a stub for the hub's library (None for nothing); its calls."""

    def build(cached=None, fetched=None):
        calls = []

        def download(*, repo_id, allow_patterns, local_files_only=False):
            calls.append("cache" if local_files_only else "hub")
            build.patterns = allow_patterns
            found = cached if local_files_only else fetched
            if found is None:
                raise OSError("nothing there\nsecond line")
            return str(write_files(tmp_path / calls[-1], *found))

        monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=download))
        monkeypatch.setitem(sys.modules, "huggingface_hub.constants", SimpleNamespace(ENDPOINT="http://unused"))
        monkeypatch.setattr(urllib.request, "urlopen", lambda *_: io.BytesIO())
        return calls

    return build


WHOLE = ("config.json", "model.safetensors")


@pytest.mark.parametrize(
    ("name", "cached", "fetched", "words", "num_calls"),
    [
        ("a/b", WHOLE, None, "weights from .*cache$", 1),
        ("a/b", None, WHOLE, "weights from .*hub$", 2),
        ("a/b", ("config.json",), WHOLE, "weights from .*hub$", 2),
        ("a/b", ("config.json",), None, "random weights, because the hub cannot be reached", 2),
        (KEPT, None, None, "random weights, because the hub cannot be reached", 2),
        (KEPT, None, WHOLE, "weights from .*hub$", 2),
    ],
)
def test_a_name_is_looked_for_in_the_cache_then_on_the_hub_then_here(hub, name, cached, fetched, words, num_calls):
    calls = hub(cached, fetched)
    received = [external.describe_weights(name) for _ in range(2)]
    assert re.search(words, received[0]), received
    assert received[0] == received[1] and len(calls) == num_calls


def test_a_damaged_index_in_the_cache_is_named_if_the_hub_cannot_be_reached(hub):
    hub(cached=("config.json", "model.safetensors.index.json"))
    with pytest.raises(ConfigError, match=r"index\.json is damaged"):
        external.describe_weights("a/b")


def test_the_weights_are_not_fetched_for_the_limits(hub, monkeypatch):
    calls = hub(cached=("config.json",))
    text = SimpleNamespace(vocab_size=64, max_position_embeddings=40)
    monkeypatch.setattr(external, "_load_config", lambda folder: SimpleNamespace(get_text_config=lambda: text))
    assert external.read_limits("a/b") == (64, 40)
    assert calls == ["cache"] and hub.patterns == ("config.json",)


def test_an_unknown_name_is_explained_in_one_line(hub, monkeypatch):
    hub()
    with pytest.raises(ConfigError, match=r"hf:a/b .*\(nothing there second line\)"):
        external.describe_weights("a/b")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
        external.describe_weights("a/b")


def test_a_name_without_safe_weights_on_the_hub_is_not_given_random_ones(hub):
    hub(fetched=("config.json",))
    with pytest.raises(ConfigError, match=r"model.safetensors"):
        external.describe_weights("a/b")


@pytest.mark.parametrize(("local_rank", "is_quiet"), [(None, False), ("0", False), ("1", True)])
def test_only_the_first_rank_of_a_host_shows_progress_bars(hub, monkeypatch, local_rank, is_quiet):
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "")  # restored at the end
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS")
    if local_rank is not None:
        for name, value in (("RANK", local_rank), ("LOCAL_RANK", local_rank), ("WORLD_SIZE", "2")):
            monkeypatch.setenv(name, value)
    hub(cached=WHOLE)
    external.describe_weights("a/b")
    assert os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") == ("1" if is_quiet else None)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "0")  # the user's own choice
    external._find_source.cache_clear()
    external.describe_weights("a/b")
    assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "0"


# Models that transformers builds


@pytest.mark.parametrize(("form", "shape"), [(TOKENS, (2, 12, 64)), (PAIRS, (2, 3))])
@pytest.mark.parametrize("config", [LLAMA, BERT], ids=["llama", "bert"])
def test_a_configuration_alone_gives_a_model_with_random_weights(transformers, tmp_path, config, form, shape):
    name = f"hf:{write_config(tmp_path, **config)}"
    assert "random weights" in describe_model(name)
    module = build_model(name, form, PLAIN)
    assert module.training and {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    out = module(torch.randint(60, (2, 12)), attention_mask=torch.ones(2, 12, dtype=torch.long))
    assert out.logits.shape == shape and getattr(out, "past_key_values", None) is None


@pytest.mark.parametrize("config", [LLAMA, BERT], ids=["llama", "bert"])
def test_encoders_become_causal_language_models(transformers, tmp_path, config):
    module = build_model(f"hf:{write_config(tmp_path, **config)}", TOKENS, PLAIN)
    assert look_back(module) == [7, 8, 9, 10, 11]


@pytest.mark.parametrize("form", [TOKENS, PAIRS], ids=["tokens", "pairs"])
def test_a_folder_with_weights_gives_them(transformers, tmp_path, form):
    saved = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**LLAMA))
    saved.save_pretrained(tmp_path)
    module = build_model(f"hf:{tmp_path}", form, PLAIN)
    assert module.training and "weights from" in describe_model(f"hf:{tmp_path}")
    expected = saved.model.embed_tokens.weight.float()
    assert torch.equal(module.model.embed_tokens.weight, expected) and module.dtype == torch.float32


def test_pairs_are_read_at_the_last_token_before_the_padding(transformers, tmp_path):
    module = build_model(f"hf:{write_config(tmp_path, **LLAMA)}", PAIRS, PLAIN).eval()
    ids = torch.arange(3, 9).reshape(1, 6)
    padded = torch.cat([ids, torch.full((1, 4), PAIRS.pad)], dim=1)
    mask = (padded != PAIRS.pad).long()
    torch.testing.assert_close(module(padded, attention_mask=mask).logits, module(ids).logits)


@pytest.mark.parametrize(
    ("changes", "form", "words"),
    [
        ({}, {"vocabulary": 65}, "has a vocabulary of 64, but the data has 65"),
        ({}, {"shape": (41,)}, "has 40 positions, but samples have 41"),
        ({"model_type": "zebra"}, {}, "config.json cannot be used: .*zebra"),
        ({"model_type": "vit", "vocab_size": None}, {}, r"\(vit\) has no vocabulary"),
        ({"model_type": "t5"}, {}, "cannot be built for tokens: .*T5Config"),
    ],
)
def test_what_does_not_fit_is_refused(transformers, tmp_path, changes, form, words):
    name = f"hf:{write_config(tmp_path, **{**LLAMA, **changes})}"
    with pytest.raises(ConfigError, match=words) as refused:
        build_model(name, DataForm(**{**vars(TOKENS), **form}), PLAIN)
    assert "\n" not in str(refused.value)


def test_code_of_a_model_is_never_run(transformers, tmp_path):
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Config: pass\n")
    write_config(tmp_path, model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    with pytest.raises(ConfigError, match=r"config.json"):
        build_model(f"hf:{tmp_path}", TOKENS, PLAIN)
    assert not ran.exists()


def test_smollm2_is_as_large_as_published_without_the_hub(transformers):
    form = default_form(f"hf:{KEPT}")
    assert (form.kind, form.vocabulary, form.shape) == ("tokens", 49152, (128,))
    with torch.device("meta"):
        module = build_model(f"hf:{KEPT}", form, PLAIN)
    assert sum(parameter.numel() for parameter in module.parameters()) == 361_821_120
    names = [name for name, _ in find_blocks(module)]
    assert names == ["model.embed_tokens", *(f"model.layers.{i}" for i in range(32)), "model.norm", "lm_head"]


@pytest.mark.parametrize("num_classes", [0, 3])
def test_the_numbers_are_those_of_transformers(transformers, num_classes):
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=50, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        num_labels=num_classes or 2, pad_token_id=49,
    )  # fmt: skip
    theirs = (transformers.GPT2ForSequenceClassification if num_classes else transformers.GPT2LMHeadModel)(config)
    ours = build_gpt2(num_classes=num_classes)
    left_out = theirs.load_state_dict(export_state(ours), strict=False)
    assert not left_out.unexpected_keys and set(left_out.missing_keys) <= {"lm_head.weight"}
    ids, lengths = torch.randint(49, (3, 12)), torch.tensor([12, 7, 1])
    mask = (torch.arange(12) < lengths[:, None]).long()
    ids = torch.where(mask == 1, ids, 49)
    targets = torch.randint(num_classes or 50, (3,) if num_classes else (3, 12))
    if not num_classes:
        targets[mask == 0] = -100
    counted = slice(None) if num_classes else mask == 1  # outputs at padding do not matter
    results = []
    for module in (ours, theirs):
        logits = module(ids, attention_mask=mask)
        logits = getattr(logits, "logits", logits)
        F.cross_entropy(logits.flatten(0, -2), targets.flatten()).backward()
        results.append(logits[counted])
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
    gradients = dict(theirs.named_parameters())
    for parameter in ours.parameters():
        parameter.data = parameter.grad
    for name, gradient in export_state(ours).items():
        torch.testing.assert_close(gradient, gradients[name].grad, rtol=1e-4, atol=1e-6, msg=name)
