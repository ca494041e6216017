"""External models and data: models of `transformers`, and functions in a user's own file.

Does not import torch at module level. Checks do not run the user's code, and model code from the hub never runs.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import linecache
import os
import re
import symtable
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote

from paceline.errors import ConfigError, PacelineError, refuse, suggest
from paceline.runtime.faults.processes import find_code
from paceline.workloads.data import DataForm, fetch_from_hub, import_hf, is_own, shorten_error

if TYPE_CHECKING:
    from torch import nn

# Bundled configurations: one folder per model, with -- instead of the slash in its name.
_KEPT = Path(__file__).parent / "configs"
_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_FILES = (_CONFIG, _WEIGHTS, "model-*.safetensors", _INDEX)
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_CLASSES = {"tokens": "AutoModelForCausalLM", "pairs": "AutoModelForSequenceClassification"}


def check_source(name: str) -> None:
    """Reject a folder without a configuration, and any model if transformers is not installed."""
    if not name:
        raise ConfigError("model hf: has no name: write hf:FOLDER, or hf:NAME as on the hub")
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / _CONFIG).is_file():
            raise ConfigError(f"model folder {path} has no {_CONFIG}: pass one written by save_pretrained()")
    elif path.is_file() or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        what = "is not a folder" if path.exists() else "does not exist"
        raise ConfigError(f"model folder {path} {what}: pass a folder with {_CONFIG}, or a name such as org/name")
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(f"model hf:{name} needs transformers, which is not installed: pip install 'paceline[hf]'")


def read_limits(name: str, files: tuple[str, ...] = (_CONFIG,)) -> tuple[int, int]:
    """Read the vocabulary size and the maximum context (a large number if unspecified)."""
    config = _load_config(_find_source(name, files)[0])
    text = config.get_text_config()
    if not isinstance(getattr(text, "vocab_size", None), int):
        raise ConfigError(f"model hf:{name} ({config.model_type}) has no vocabulary: only text models are supported")
    return int(text.vocab_size), int(getattr(text, "max_position_embeddings", None) or 2**20)


def describe_weights(name: str) -> str:
    """Describe the origin of the weights in one line. Shares its cached search with `build_hf`."""
    folder, lack = _find_source(name, _FILES)
    return f"hf:{name}: random weights, {lack}" if lack else f"hf:{name}: weights from {folder}"


def build_hf(name: str, form: DataForm) -> nn.Module:
    """Build a causal language model for tokens, or a sequence classifier for pairs, with float32 parameters."""
    folder, lack = _find_source(name, _FILES)
    vocabulary, context = read_limits(name, _FILES)
    if form.vocabulary > vocabulary:
        what = f"model hf:{name} has a vocabulary of {vocabulary}, but the data has {form.vocabulary}"
        raise ConfigError(f"{what}: use the model's own tokenizer, or bytes")
    if form.shape[0] > context:
        raise ConfigError(f"model hf:{name} has {context} positions, but samples have {form.shape[0]}: shorten them")
    config = _load_config(folder)
    # Only generation needs the KV cache.
    config.use_cache = False
    if form.kind == "pairs":
        config.num_labels, config.pad_token_id = form.num_classes, form.pad
    elif getattr(config, "is_decoder", None) is False:
        # Otherwise an encoder such as BERT would see the tokens that it should predict.
        config.is_decoder = True
    import torch

    transformers = import_hf("transformers")
    maker = getattr(transformers, _CLASSES[form.kind])
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    dtype = {"dtype" if version >= (4, 56) else "torch_dtype": torch.float32}
    # transformers 4 builds the inner model with the configuration's dtype, regardless of the argument.
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
    """Find a model's folder, and the reason why it has no weights (empty if it has). Search order: a folder of this
    name, the hub's cache, the hub, the bundled configurations."""
    path = Path(name).expanduser()
    wants_weights = _WEIGHTS in files
    if path.is_dir():
        return path, _check_folder(path) if wants_weights else ""
    known = _KEPT / name.replace("/", "--")
    damage: ConfigError | None = None

    def is_complete(folder: Path) -> bool:
        nonlocal known, damage
        if not (folder / _CONFIG).is_file():
            return False
        try:
            if not wants_weights or not _missing_weights(folder):
                return True
        except ConfigError as error:
            damage = error
            raise
        known = folder
        return False

    reason = f"it has no {_CONFIG}"
    try:
        folder = fetch_from_hub(is_complete, repo_id=name, allow_patterns=files)
    except Exception as error:
        if damage is not None:  # the user can repair the folder
            raise damage from error
        reason = shorten_error(error)
    else:
        if is_complete(folder):
            return folder, ""
        refuse((known == folder, f"model hf:{name} has no {_WEIGHTS} on the hub, and no other format is supported"))
    if known.is_dir():
        return known, "because the hub cannot be reached and only the configuration is available"
    offline = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else reason
    what = f"model hf:{name} is neither a local folder nor in the hub's cache, and cannot be downloaded ({offline})"
    raise ConfigError(f"{what}: pass the path of a folder with its {_CONFIG}")


def _check_folder(folder: Path) -> str:
    """The reason why the user's folder has no weights, or an empty string."""
    missing = _missing_weights(folder)
    pickles = [file for file in _PICKLES if (folder / file).exists()]
    if missing and missing != [_WEIGHTS]:
        raise ConfigError(f"model folder {folder} lacks {', '.join(missing)}, listed in {_INDEX}: copy them there")
    if missing and pickles:
        text = f"has its weights in a pickle ({pickles[0]}), which can run code: save safetensors"
        raise ConfigError(f"model folder {folder} {text}")
    return f"because {folder} holds only a configuration" if missing else ""


def _missing_weights(folder: Path) -> list[str]:
    """The weight files missing from the folder."""
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


_GIVE = "pass the name of a function in it"
# Optional arguments of a user's function, passed by name, besides the data form.
FACTS = ("batch_size", "rank", "world_size", "device", "seed")


def check_own(name: str, what: str = "model") -> None:
    """Reject a missing file, a file that is not Python, and a function that it does not define."""
    path, function = _split(name, what)
    try:
        text = path.read_text(encoding="utf-8")
        symbols = symtable.symtable(text, str(path), "exec").get_symbols()
    except OSError as error:
        raise ConfigError(f"{what} file {path} cannot be read: {error.strerror or error}") from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{what} file {path} is not Python: {error}") from error
    names = [symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()]
    # Star imports define names only at run time.
    if function not in names and not re.search(r"import\s*\*", text):
        raise ConfigError(f"{what} file {path} defines no {function}: {suggest(function, names)}{_GIVE}")


def _split(name: str, what: str) -> tuple[Path, str]:
    file, _, function = name.rpartition(":")
    if not file or not function:
        write = f"write FILE.py:FUNCTION, such as {name.rstrip(':')}:build"
        raise ConfigError(f"{what} {name!r} names no function: {write}")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"{what} file {path} does not exist: pass a Python file, relative to {Path.cwd()}")
    return path, function


class OwnParts(NamedTuple):
    """The result of a user's function for `--model`: a module, or several in an `nn.ModuleDict`, and optionally data, a
    step, an evaluation, and further objects with state."""

    model: nn.Module
    data: Any = None
    step: Callable[..., Any] | None = None
    evaluate: Callable[..., Any] | None = None
    state: Mapping[str, Any] | None = None


_RETURNS = "a torch.nn.Module, (model, step), (model, data, step), or a dict with model, data, step, evaluate, state"


def open_own(name: str, form: DataForm | None, **facts: Any) -> tuple[OwnParts, frozenset[str]]:
    """Call the user's function for `--model`. Returns its result and the names of the arguments that it took."""
    from torch import nn

    found, taken = call_own(name, "model", form=form, **facts)
    if isinstance(found, nn.Module):
        return OwnParts(found), taken
    if isinstance(found, tuple) and len(found) in (2, 3):
        found = dict(zip(("model", "data", "step") if len(found) == 3 else ("model", "step"), found, strict=True))
    said = f"model {name} returned a"
    keys = list(map(str, found)) if isinstance(found, Mapping) else []
    what = f"{said} {type(found).__name__}{' with ' * bool(keys)}{', '.join(keys)}: it must return {_RETURNS}"
    refuse((not {"model", "step"} <= set(keys) <= set(OwnParts._fields), what), code="own-type")
    parts = OwnParts(**found)
    state = {} if parts.state is None else parts.state
    is_a = {
        "model": (isinstance(parts.model, nn.Module), "must be a torch.nn.Module, or several in an nn.ModuleDict"),
        "step": (callable(parts.step), "must be a function (model, batch)"),
        "state": (isinstance(state, Mapping), "must be a dict of optimizers and similar objects"),
        "evaluate": (parts.evaluate is None or callable(parts.evaluate), "must be a function (model, batch)"),
    }
    for key, (fits, needed) in is_a.items():
        refuse((not fits, f"{said} {type(getattr(parts, key)).__name__} as {key}: {needed}"), code="own-type")
    odd = ", ".join(str(key) for key, part in state.items() if not hasattr(part, "load_state_dict"))
    what = f"{said} state with objects that lack load_state_dict: {odd}; use, for example, optimizers"
    refuse((odd, what), code="own-type")
    return parts, taken


def build_own(name: str, form: DataForm) -> nn.Module:
    """Build the module with the user's function, which may take the data form."""
    parts, _ = open_own(name, form)
    if parts.step is not None:
        raise ConfigError(f"model {name} also returned a step: return only a torch.nn.Module here", code="own-type")
    return parts.model


def call_own(name: str, what: str, **facts: Any) -> tuple[Any, frozenset[str]]:
    """Call the user's function with the arguments that it takes. Returns the result and the arguments' names."""
    path, function = _split(name, what)
    with own_errors(name, what, always=True):
        stat = path.stat()
        module = _load_file(path.resolve(), (stat.st_mtime_ns, stat.st_size))
        found = getattr(module, function, None)
        if callable(found):
            return _call(f"{what} {name}", found, facts)
    kind = f"{function} of type {type(found).__name__}" if hasattr(module, function) else f"no {function}"
    raise ConfigError(f"{what} file {path} defines {kind}: {suggest(function, vars(module))}{_GIVE}")


@contextlib.contextmanager
def own_errors(name: str, what: str = "model", always: bool = False) -> Iterator[None]:
    """Report an error from the user's file, or a file next to it, with its line; other errors propagate unless
    `always`. In this context, the file can import its neighbors. Does nothing if the name is not a user's file."""
    if not is_own(name):
        yield
        return
    folder = _find_folder(name)
    sys.path.insert(0, folder)
    try:
        yield
    except (PacelineError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        line = _find_line(error, folder)
        if find_code(error) or (line is None and not always):  # a lost peer is not the user's error
            raise
        lines = str(error).splitlines() or [""]
        said = f"{type(error).__name__}: {lines[0]}"
        if "Original Traceback" in str(error):  # from a DataLoader worker, which sends the error as text
            said = lines[-1]
        raise ConfigError(f"{what} {name} raised {said}{f' ({line})' if line else ''}", code="own-error") from error
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


@lru_cache
def _find_folder(name: str) -> str:
    return str(Path(name.rpartition(":")[0]).expanduser().resolve().parent)


def _find_line(error: BaseException, folder: str) -> str | None:
    """Find the last line of a user's file in an error's traceback or text."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    frames += [(file, int(number)) for file, number in re.findall(r'File "([^"]+)", line (\d+)', str(error))]
    library = str(Path(__file__).parents[1])
    for file, number in reversed(frames):
        if file.startswith(folder + os.sep) and not file.startswith(library) and "site-packages" not in file:
            source = linecache.getline(file, number or 0).strip()
            return f"{os.path.relpath(file, folder)}, line {number}: {source}"
    return None


@lru_cache(maxsize=8)
def _load_file(path: Path, stamp: tuple[int, int]) -> ModuleType:
    """Import the file as a module, and reload it only after a change, so it can cache data."""
    name = f"{__name__}.{quote(str(path), safe='/').replace('.', '%2E')}"
    sys.modules.pop(name, None)
    return importlib.import_module(name)


class _OwnFiles(importlib.abc.MetaPathFinder):
    """Imports a user's file as a submodule of this one, named after its path. Spawned processes can then unpickle its
    objects, and files of the same name do not clash."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        parent, _, file = name.rpartition(".")
        return importlib.util.spec_from_file_location(name, unquote(file)) if parent == __name__ else None


__path__: list[str] = []  # makes this module a package
sys.meta_path.append(_OwnFiles())


def _call(name: str, function: Callable[..., Any], facts: dict[str, Any]) -> tuple[Any, frozenset[str]]:
    """Pass each fact that the function has a parameter for, and the data form as the only other required argument."""
    found = inspect.signature(function).parameters.values()
    by_name = {p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = {p.name for p in found if p.default is p.empty}
    taken = {key: value for key, value in facts.items() if key in by_name and value is not None}
    taken = {key: value for key, value in taken.items() if key != "form" or key not in required}
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p for p in found if p.default is p.empty and p.kind not in variable and p.name not in taken]
    form, what = facts.get("form"), ", ".join(p.name for p in needed)
    first = "the data form and " * ("form" in facts)
    unknown = f"{name} needs the data form: specify the data, for example --data synthetic:images"
    text = f"{name} needs {what}: Paceline passes only {first}the named arguments {', '.join(FACTS)}"
    refuse((len(needed) > ("form" in facts), text), code="own-type")
    refuse((needed and form is None, unknown), code="no-data")
    for parameter in needed:
        # Pass the first parameter by position, because a decorator may hide its name.
        if parameter is next(iter(found)) and parameter.kind != parameter.KEYWORD_ONLY:
            return function(form, **taken), frozenset(taken)
        taken[parameter.name] = form
    return function(**taken), frozenset(taken)
