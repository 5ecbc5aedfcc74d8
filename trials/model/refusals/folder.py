"""A model folder's files, checked before a library reads them.

transformers builds whatever a configuration asks for: a module per layer, a name per label. So the numbers that decide
about time and memory are bounded here, at about ten times what the largest published models have.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HFValidationError

from trials.errors import ModelError
from trials.model import hub
from trials.model.refusals.refusal import reason
from trials.regular_file import LFS_POINTER, check_regular, open_regular

CONFIG = "config.json"
_ADAPTER = "adapter_config.json"
MOST_LAYERS = 2_000
"""Layers of one tower. Building takes some milliseconds per layer; the deepest published models have about 130."""
# A choice: 6,000 added tokens with options take about 1 MB.
_SETTINGS_BYTES = 16 << 20
_VOCABULARY_BYTES = 128 << 20
"""The largest published tokenizers have about 35 MB."""
# A choice: an index has about 100 bytes for each tensor, and mixtures of experts some 100,000 tensors.
_INDEX_BYTES = 128 << 20
_MOST_VALUES = 500_000
"""Values of a settings file; names of 21,000 labels, or 6,000 added tokens with options, are a tenth of it."""
_MOST_TOKENS = 10_000_000
"""Values of a vocabulary file; the largest published have 1.3 million. In Python each may take 64 bytes."""
# A choice: published settings nest 4 or 5 deep, and readers of them are recursive.
_DEEPEST = 32
_SHOWN = 60
_VOCABULARIES = ("tokenizer.json", "vocab.json", "tekken.json", "vocab.txt", "merges.txt")
_OTHERS = ("*.model", "*.tiktoken", "*.jinja", "additional_chat_templates/*.jinja")
"""Binary vocabularies, and chat templates."""
_SETTINGS = (
    CONFIG,
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
)
_BOUNDED = (CONFIG, "preprocessor_config.json", "processor_config.json")
"""The numbers of a tokenizer's settings cost nothing; `model_max_length` is often 10^30."""
# Choices above all published models: larger numbers would fill the memory or take minutes.
_MOST = (
    (re.compile(r"(layers?|depths?|blocks|stages)$"), MOST_LAYERS),
    (re.compile(r"^(max|min)_patches$"), 4_096),
    (re.compile(r"image_seq|image_tokens|patches$"), 65_536),
    (re.compile(r"vocab|embeddings$|positions$|tokens"), 100_000_000),
    (re.compile(r"^(num|n)_|heads$|experts|labels$"), 100_000),
    (re.compile(r"image_size$"), 20_000),
    # A chunk is a piece of data, and no size of a weight.
    (re.compile(r"((?<!chunk_)size|dim|width|channels)$"), 1_000_000),
)
"""The first pattern that a name matches bounds its whole numbers."""
_POSITIVE = frozenset(
    (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "max_position_embeddings",
        "image_size",
        "patch_size",
        "num_channels",
        "max_patches",
        "min_patches",
    )
)


def check_place(path: str) -> None:
    """Raise ModelError where there is no model: neither a folder with a configuration nor a hub id that can be read."""
    folder = Path(path)
    if folder.is_dir():
        if not (folder / CONFIG).is_file():
            check_adapter(folder)
            raise ModelError(f"model folder {path} has no {CONFIG}; save the model there with save_pretrained")
    elif folder.is_file():
        raise ModelError(f"model {path} is a file; give the folder that it is in")
    elif folder.is_absolute() or path.startswith("."):
        raise ModelError(f"model folder {path} does not exist; give a local folder or a hub id such as org/name")
    else:
        nowhere, server = f"model {path} is not a folder next to the job file", huggingface_hub.constants.ENDPOINT
        try:
            cached = isinstance(huggingface_hub.try_to_load_from_cache(path, CONFIG), str)
        except HFValidationError as error:
            raise ModelError(f"{nowhere} and no hub id; correct model.path: {reason(error)}") from error
        # Asked here first: where nothing answers, the hub's client tries for minutes.
        if not (cached or huggingface_hub.is_offline_mode() or hub.answers(server)):
            raise ModelError(f"{nowhere}, and {server} does not answer; {hub.remedy(path)}")


def check_folder(folder: Path) -> None:
    """Raise ModelError for a file that cannot be read to its end, broken settings, and a number out of bounds."""
    for name in _SETTINGS:
        if (folder / name).exists():
            check_settings(folder / name)
    for name in _VOCABULARIES:
        if (folder / name).exists():
            _check_size(folder / name, _VOCABULARY_BYTES)
            _check_values(folder / name, _MOST_TOKENS)
    for path in (path for pattern in _OTHERS for path in folder.glob(pattern) if path.exists()):
        _check_size(path, _VOCABULARY_BYTES)


def check_adapter(folder: Path) -> None:
    """Raise ModelError for a folder with an adapter of peft: with it, transformers loads another model."""
    if not (folder / _ADAPTER).exists():
        return
    merge = "merge it into that model, as by merge_and_unload of peft, and save the result with save_pretrained"
    if (folder / CONFIG).exists():
        raise ModelError(
            f"model folder {folder} holds a model and an adapter of peft ({_ADAPTER}); {merge}, or move that file out "
            "of the folder to train the model without the adapter"
        )
    base = ascii(_read_object(folder / _ADAPTER, _SETTINGS_BYTES, _MOST_VALUES).get("base_model_name_or_path"))
    raise ModelError(f"model folder {folder} holds an adapter of peft for {base:.{_SHOWN}}, not a model; {merge}")


def check_pointer(path: Path) -> None:
    """Raise ModelError for what a clone without Git LFS has in the place of a file."""
    try:
        with open_regular(path) as stream:
            is_pointer = stream.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:  # named where the file is read
        return
    if is_pointer:
        raise ModelError(f"{path} is a pointer of Git LFS, not the file itself; run `git lfs pull` in {path.parent}")


def check_settings(path: Path) -> dict[str, Any]:
    """Return the settings of a file.

    Raise ModelError unless the file is one JSON object, with numbers within bounds where they cost something.
    """
    settings = _read_object(path, _SETTINGS_BYTES, _MOST_VALUES)
    for names, value in _values((), settings):
        if len(names) > _DEEPEST:
            raise _error(path, f"sections are nested more than {_DEEPEST} deep")
        if isinstance(value, float) and not math.isfinite(value):
            raise _error(path, f"{_dotted(names)} is {value}, which is no number")
        if names[-1:] == ("model_type",) and not isinstance(value, str):
            raise _error(path, f"{_dotted(names)} is {_shown(value)}, which must be a name")
        if names and names[-1].endswith("_implementation") and "/" in str(value):
            raise _error(path, f"{_dotted(names)} is {_shown(value)}, code of a hub that is never run")
        if path.name in _BOUNDED:
            _check_bounds(path, names, value)
    if path.name != CONFIG:
        return settings
    architectures = settings.get("architectures")
    is_list = isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    if architectures is not None and not is_list:
        raise _error(path, f"architectures is {_shown(architectures)}, which must be a list of names")
    if "configuration_files" in settings:
        raise _error(path, "it names other files by configuration_files, which are not followed")
    return settings


def read_index(path: Path) -> dict[str, Any]:
    """Return the index of a model's weight files, a JSON object. Raise ModelError."""
    return _read_object(path, _INDEX_BYTES, _MOST_TOKENS)


def _read_object(path: Path, most_bytes: int, most_values: int) -> dict[str, Any]:
    """Return the one JSON object that the file holds. Raise ModelError."""
    _check_size(path, most_bytes)
    _check_values(path, most_values)
    try:
        value = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise _error(path, f"it is not a valid JSON file: {error}") from error
    if not isinstance(value, dict):
        raise _error(path, f"it holds a JSON {type(value).__name__}, not an object")
    return value


def _values(names: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every value with the keys that lead to it; the elements of a list have `[]` as theirs."""
    yield names, value
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _values((*names, key), child)
    elif isinstance(value, list):
        for child in value:
            yield from _values((*names, "[]"), child)


def _check_bounds(path: Path, names: tuple[str, ...], value: Any) -> None:
    name = next((name for name in reversed(names) if name != "[]"), "")
    if isinstance(value, bool) and name in _POSITIVE:
        raise _error(path, f"{_dotted(names)} is {str(value).lower()}, which must be a whole number")
    if not isinstance(value, int | float):
        return
    if name in _POSITIVE and value < 1:
        raise _error(path, f"{_dotted(names)} is {value}, which must be at least 1")
    most = next((most for pattern, most in _MOST if pattern.search(name)), None)
    if most is not None and abs(value) > most:
        raise _error(path, f"{_dotted(names)} is {_shown(value)}, more than the {most} that are taken")


def _check_size(path: Path, most_bytes: int) -> None:
    check_pointer(path)
    try:
        size = check_regular(path)
    except OSError as error:
        raise _error(path, str(error)) from error
    if size > most_bytes:
        raise _error(path, f"it has {size} bytes, more than the {most_bytes} that are read")


def _check_values(path: Path, most: int) -> None:
    """Count JSON values without parsing them, which would allocate an object for each."""
    values = 0
    try:
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                values += sum(map(block.count, (b",", b"[", b"{")))
    except OSError as error:
        raise _error(path, f"it cannot be read: {error}") from error
    if values > most:
        raise _error(path, f"it has more than {most} values")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _dotted(names: tuple[str, ...]) -> str:
    return ".".join(names).replace(".[]", "[]")[:_SHOWN]


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _error(path: Path, fault: str) -> ModelError:
    return ModelError(f"{path} cannot be used: {fault}; copy or download the model again, or correct the file")
