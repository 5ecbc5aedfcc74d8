"""The files of a model folder from which its weights are read: those that transformers reads where several sets are."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError, safe_open

from trials.errors import ModelError
from trials.model.hub import published_name
from trials.model.refusals.folder import CONFIG, check_pointer, check_settings, read_index
from trials.regular_file import check_regular

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_NAMED = "transformers_weights"
"""Key of the configuration that names a file of weights or an index, which comes before all others."""
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
"""transformers takes a folder with such files for a distributed checkpoint, whatever else is there."""
_OLD = re.compile(r"(pytorch|tf|flax)_model[.\d\w-]*\.(bin|h5|msgpack)")
_WEIGHTS = re.compile(
    rf"{_OLD.pattern}|adapter_model\.bin|consolidated[.\d]*\.(pth|pt)|.*\.(safetensors|gguf)"
    r"|.*\.(safetensors|bin)\.index(\.\w+)?\.json"
)
# Choices: names come from a file and may be of any length; a few say which sets of weights there are.
_SHOWN = 60
_FEW = 3
_AGAIN = "copy or download the model's weights again"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenFiles:
    """The safetensors files that hold a model's weights."""

    folder: Path
    source: Path
    """The one file, or the index of several."""
    files: tuple[Path, ...]
    """In the order in which transformers reads them: of a tensor that two hold, the last one counts."""
    indexed: Mapping[str, Path] = field(default_factory=dict)
    """The file in which an index says that a tensor is."""

    def tensors(self) -> dict[str, tuple[Path, tuple[int, ...]]]:
        """Return the file and the shape of every tensor, as transformers finds them: the index chooses files alone.

        Raise ModelError for a file that cannot be read, and for a tensor of the index that none of its files holds.
        """
        found: dict[str, tuple[Path, tuple[int, ...]]] = {}
        for path in self.files:
            with opened(path) as file:
                found |= {key: (path, tuple(file.get_slice(key).get_shape())) for key in file.keys()}  # noqa: SIM118
        if lacking := sorted(self.indexed.keys() - found.keys()):
            name = lacking[0]
            raise ModelError(
                f"{self.indexed[name]} does not hold {name[:_SHOWN]}, as {self.source.name} says; {_AGAIN}"
            )
        return found

    def notes(self) -> Iterator[str]:
        """Yield what a user should know of the choice: weights that are passed over, and an index that is wrong."""
        if others := self._passed_over():
            shown = ", ".join(others[:_FEW]) + (f" and {len(others) - _FEW} more" if len(others) > _FEW else "")
            yield (
                f"{self.folder} holds several sets of weights; those of {self.source.name} are used, as by "
                f"transformers, and {shown} passed over"
            )
        held = self.tensors()
        if moved := sorted(name for name, path in self.indexed.items() if held[name][0] != path):
            name = moved[0]
            yield (
                f"{self.source} is not right about {len(moved)} tensors: {name[:_SHOWN]} is read from "
                f"{held[name][0].name}, as by transformers, and not from {self.indexed[name].name}"
            )

    def _passed_over(self) -> list[str]:
        used = {self.source, *self.files}
        return sorted(
            path.name
            for path in self.folder.iterdir()
            if _WEIGHTS.fullmatch(path.name) and path not in used and path.is_file()
        )


def chosen_files(folder: Path) -> ChosenFiles:
    """Return the files that `from_pretrained` reads of a folder, which needs no other file for that.

    Raise ModelError where it would read none, or files that are not safetensors within the folder.
    """
    source = _source(folder)
    if not source.name.endswith(".index.json"):
        return ChosenFiles(folder=folder, source=source, files=(source,))
    weight_map = read_index(source).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{source} has no weight_map, so it is no index of weights; {_AGAIN}")
    for name, file in weight_map.items():
        if not _is_within(file, ".safetensors"):
            raise ModelError(
                f"{source} names {ascii(file)[:_SHOWN]} for {name[:_SHOWN]}, which is no safetensors file of its "
                f"folder; {_AGAIN}"
            )
    files = tuple(folder / file for file in sorted(set(weight_map.values())))
    return ChosenFiles(
        folder=folder, source=source, files=files, indexed={name: folder / file for name, file in weight_map.items()}
    )


def opened(path: Path) -> Any:
    """Open a safetensors file; reading tensors raises nothing more once its header is read."""
    check_pointer(path)
    try:
        check_regular(path)
        return safe_open(path, framework="pt")
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"weight file {path} cannot be read ({error}); {_AGAIN}") from error


def _source(folder: Path) -> Path:
    """Return the file of weights, or the index, that counts."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if shards := [name for name in names if _DISTRIBUTED.fullmatch(name)]:
        raise ModelError(
            f"{folder} holds a distributed checkpoint ({shards[0]}), which transformers reads in place of other "
            "weights; load it and save it to another folder with save_pretrained, or move these files out of the folder"
        )
    if (named := _named(folder)) is not None:
        return folder / named
    single, index = folder / _SINGLE, folder / _INDEX
    # transformers takes the single file even where an index stands next to it.
    if not single.is_file() and index.exists():
        return index
    if single.exists():
        return single
    model, old = published_name(str(folder)), next((name for name in names if _OLD.fullmatch(name)), None)
    if not folder.is_dir() or (model != str(folder) and old is None):
        raise ModelError(
            f"the weights of model {model} are not on this machine as safetensors; run `hf download {model}`, or "
            "save them in a folder and give it as model.path"
        )
    raise ModelError(
        f"{folder} has no {_SINGLE}{f' but {old}' if old else ''}; save the weights there as safetensors, or set "
        "`model.weights: random`"
    )


def _named(folder: Path) -> str | None:
    """Return the file that the configuration names, if it names one."""
    if not (folder / CONFIG).exists():
        return None
    name: object = check_settings(folder / CONFIG).get(_NAMED)
    if name is None:
        return None
    if not _is_within(name, ".safetensors", ".safetensors.index.json"):
        raise ModelError(
            f"{_NAMED} of {folder / CONFIG} is {ascii(name)[:_SHOWN]}, which is no file of safetensors in that folder, "
            "nor an index of them; correct it, or remove it to read model.safetensors"
        )
    return str(name)


def _is_within(name: object, *endings: str) -> bool:
    """Tell whether a name is that of a file with one of these endings in the folder or below it."""
    if not isinstance(name, str) or not name.endswith(endings):
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts
