"""Models that Paceline does not bring: those of `transformers`, and a user's own file.

Loads without torch. Checking runs no code of the user's, and code that comes with a model of the hub never runs.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import symtable
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError, suggest
from paceline.workloads.data import DataForm, import_hf, shorten_error

if TYPE_CHECKING:
    from torch import nn

# One folder for each configuration that Paceline brings, named as its model with -- for the slash.
_KEPT = Path(__file__).parent / "configs"
_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_FILES = (_CONFIG, _WEIGHTS, "model-*.safetensors", _INDEX)
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_HUB_TIMEOUT_S = 5
_CLASSES = {"tokens": "AutoModelForCausalLM", "pairs": "AutoModelForSequenceClassification"}


def check_source(name: str) -> None:
    """Refuse a folder without a configuration, and any model where transformers is not installed."""
    if not name:
        raise ConfigError("model hf: names nothing: write hf:FOLDER, or hf:NAME as the hub has it")
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / _CONFIG).is_file():
            raise ConfigError(f"model folder {path} has no {_CONFIG}: give a folder that transformers saved a model in")
    elif path.is_file() or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        what = "is not a folder" if path.exists() else "does not exist"
        raise ConfigError(f"model folder {path} {what}: give a folder with {_CONFIG}, or a name such as org/name")
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(f"model hf:{name} needs transformers, which is not installed: pip install 'paceline[hf]'")


def read_limits(name: str, files: tuple[str, ...] = (_CONFIG,)) -> tuple[int, int]:
    """The vocabulary, and the longest context (a large number where the model states none)."""
    config = _load_config(_find_source(name, files)[0])
    text = config.get_text_config()
    if not isinstance(getattr(text, "vocab_size", None), int):
        raise ConfigError(f"model hf:{name} ({config.model_type}) has no vocabulary: only models of tokens are served")
    return int(text.vocab_size), int(getattr(text, "max_position_embeddings", None) or 2**20)


def describe_weights(name: str) -> str:
    """Where the weights come from, in one line. Searches as `build_hf` does, and caches the answer."""
    folder, lack = _find_source(name, _FILES)
    return f"hf:{name}: random weights, {lack}" if lack else f"hf:{name}: weights from {folder}"


def build_hf(name: str, form: DataForm) -> nn.Module:
    """A causal language model for tokens, a classifier of sequences for pairs, with float32 parameters."""
    folder, lack = _find_source(name, _FILES)
    vocabulary, context = read_limits(name, _FILES)
    if form.vocabulary > vocabulary:
        what = f"model hf:{name} has a vocabulary of {vocabulary}, and the data one of {form.vocabulary}"
        raise ConfigError(f"{what}: use the model's own tokenizer, or bytes")
    if form.shape[0] > context:
        raise ConfigError(f"model hf:{name} has {context} positions, and the data {form.shape[0]}: use fewer")
    config = _load_config(folder)
    # What a training step returns should hold no cache of keys and values, which only generating uses.
    config.use_cache = False
    if form.kind == "pairs":
        config.num_labels, config.pad_token_id = form.num_classes, form.pad
    elif getattr(config, "is_decoder", None) is False:
        # An encoder such as BERT would see the tokens that it has to predict.
        config.is_decoder = True
    import torch

    transformers = import_hf("transformers")
    maker = getattr(transformers, _CLASSES[form.kind])
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    dtype = {"dtype" if version >= (4, 56) else "torch_dtype": torch.float32}
    # Classes of version 4 build their inner model from the configuration's own dtype, whatever the outer one is given.
    config.update(dtype)
    options: dict[str, Any] = {"config": config, "trust_remote_code": False, **dtype}
    try:
        if lack:
            return maker.from_config(**options)  # type: ignore[no-any-return]
        module = maker.from_pretrained(folder, use_safetensors=True, local_files_only=True, **options)
        return module.train()  # type: ignore[no-any-return]
    except Exception as error:
        raise ConfigError(f"model hf:{name} cannot be built for {form.kind}: {shorten_error(error)}") from error


@lru_cache
def _find_source(name: str, files: tuple[str, ...]) -> tuple[Path, str]:
    """The folder of a model, and why there are no weights in it; empty where there are. The folder is given, in the
    hub's cache, fetched from the hub, or kept here, in this order."""
    path, wants_weights = Path(name).expanduser(), _WEIGHTS in files
    if path.is_dir():
        return path, _check_folder(path) if wants_weights else ""
    reason, known = "", _KEPT / name.replace("/", "--")
    for options in ({"local_files_only": True}, {"etag_timeout": _HUB_TIMEOUT_S}):
        try:
            hub = import_hf("huggingface_hub")
            folder = Path(hub.snapshot_download(name, allow_patterns=files, **options))
        except Exception as error:
            # The hub's errors have no common parent in all of its versions; the text below names it.
            reason = shorten_error(error)
            continue
        if (folder / _CONFIG).is_file():
            if not wants_weights or not _missing_weights(folder):
                return folder, ""
            if "local_files_only" not in options:
                raise ConfigError(f"model hf:{name} has no {_WEIGHTS} on the hub: no other format is read")
            known = folder
    if known.is_dir():
        return known, "because the hub cannot be reached and only its configuration is here"
    offline = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else reason
    what = f"model hf:{name} is neither a folder here nor in the hub's cache, and cannot be fetched ({offline})"
    raise ConfigError(f"{what}: give the path of a folder with its {_CONFIG}")


def _check_folder(folder: Path) -> str:
    """Why there are no weights in a folder of the user's; empty where there are."""
    missing = _missing_weights(folder)
    pickles = [file for file in _PICKLES if (folder / file).exists()]
    if missing and missing != [_WEIGHTS]:
        raise ConfigError(f"model folder {folder} lacks {', '.join(missing)}, named in {_INDEX}: copy them there")
    if missing and pickles:
        text = f"has its weights in a pickle ({pickles[0]}), which can run code: save safetensors"
        raise ConfigError(f"model folder {folder} {text}")
    return f"because {folder} holds only a configuration" if missing else ""


def _missing_weights(folder: Path) -> list[str]:
    """The files of weights that should be in the folder and are not."""
    names, index = {_WEIGHTS}, folder / _INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{index} is damaged: {shorten_error(error)}") from error
    return sorted(name for name in names if not (folder / name).is_file())


def _load_config(folder: Path) -> Any:
    try:
        loader = import_hf("transformers").AutoConfig
        return loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(f"{folder / _CONFIG} cannot be used: {shorten_error(error)}") from error


_GIVE = "give the name of a function in it that returns the module"


def is_own(name: str) -> bool:
    """Whether the name of a model is that of a user's file, with or without a function in it."""
    return name.rpartition(":")[0].endswith(".py") or name.endswith(".py")


def check_own(name: str) -> None:
    """Refuse a file that is not there or not Python, and a name that it does not define."""
    path, function = _split(name)
    try:
        text = path.read_text(encoding="utf-8")
        symbols = symtable.symtable(text, str(path), "exec").get_symbols()
    except OSError as error:
        raise ConfigError(f"model file {path} cannot be read: {error.strerror or error}") from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"model file {path} is not Python: {error}") from error
    names = [symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()]
    # What a star brings, only running would show.
    if function not in names and not re.search(r"import\s*\*", text):
        raise ConfigError(f"model file {path} defines no {function}: {suggest(function, names)}{_GIVE}")


def _split(name: str) -> tuple[Path, str]:
    file, _, function = name.rpartition(":")
    if not file or not function:
        raise ConfigError(f"model {name!r} names no function: write FILE.py:FUNCTION, such as {name.rstrip(':')}:build")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"model file {path} does not exist: give the path of a Python file, from {Path.cwd()}")
    return path, function


def build_own(name: str, form: DataForm) -> nn.Module:
    """Call the user's function, with the form of the data if it takes one argument."""
    from torch import nn

    path, function = _split(name)
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # the file may import its neighbours, also from inside the function
    try:
        module = _call(name, _load_function(path, function), form)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"model {name} raised {type(error).__name__}: {error}") from error
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model {name} returned a {type(module).__name__}: it must return a torch.nn.Module")
    return module


def _load_function(path: Path, function: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(f"paceline_own_{path.stem}", path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles look for their module there.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"model file {path} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, function, None)
    if not callable(found):
        what = f"{function} of type {type(found).__name__}" if hasattr(module, function) else f"no {function}"
        raise ConfigError(f"model file {path} defines {what}: {suggest(function, vars(module))}{_GIVE}")
    return found  # type: ignore[no-any-return]


def _call(name: str, function: Callable[..., Any], form: DataForm) -> Any:
    """Hand over the form as the one argument that must be given, or as the one called `form`."""
    found = inspect.signature(function).parameters.values()
    needed = [p for p in found if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(needed) > 1:
        what = f"needs {', '.join(parameter.name for parameter in needed)}"
        raise ConfigError(f"model {name} {what}: it is called with the form of the data, or with nothing")
    for parameter in needed or (p for p in found if p.name == "form"):
        # By position where it must be given: a decorator may hide its name.
        by_position = parameter.POSITIONAL_OR_KEYWORD if needed else parameter.POSITIONAL_ONLY
        return function(form) if parameter.kind <= by_position else function(**{parameter.name: form})
    return function()
