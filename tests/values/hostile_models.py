"""Damaged and hostile model folders, each used by a process of its own whose time and memory are limited.

Run as a module with a valid model folder, it prints how some of CASES, or random damages, ended.
"""

import gc
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.model_shape import model_shape
from trials.errors import ModelError
from trials.job import DataSection, ModelSection
from trials.model.inputs import chat
from trials.model.inputs.encoders import load_encoder

MOST_BYTES = 3 << 29
MOST_SECONDS = 60
_ROOT = Path(__file__).parents[2]
_DATA = DataSection.model_validate({"sources": [{"path": "a"}]})
Spoil = Callable[[Path], object]
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
ODD_VALUES: tuple[Any, ...] = (
    None, [], {}, 0, -1, 3, 5, 10**9, 10**18, 10**400, "eight", "", True, 1.5, -0.5, float("nan"), float("inf"),
    [5], [0, 0], [10**9, 10**9], [1, 2, 3], [[]], {"a": 1}, "x" * 10_000,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of the use of one folder."""

    messages: list[str]
    """Messages of the ModelErrors."""
    raised: list[str]
    """Errors of any other kind."""
    peak_bytes: int
    seconds: float
    died: bool
    """Whether it ended without an answer: after the time limit, or by a signal."""


def config(**values: Any) -> Spoil:
    """Sets `section__key`, or a key, of config.json."""
    return settings("config.json", **values)


def settings(file: str, **values: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        document = json.loads((folder / file).read_text())
        for name, value in values.items():
            *sections, key = name.split("__")
            inner = document
            for section in sections:
                inner = inner[section]
            inner[key] = value
        (folder / file).write_text(json.dumps(document))

    return spoil


def text(file: str, content: str) -> Spoil:
    return lambda folder: (folder / file).write_text(content)


def without(file: str) -> Spoil:
    return lambda folder: (folder / file).unlink()


def pipe(file: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / file)

    return spoil


def device(file: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        (folder / file).symlink_to("/dev/zero")

    return spoil


_IMAGES, _TOKENIZER = "preprocessor_config.json", "tokenizer_config.json"
CASES: dict[str, tuple[Spoil, str]] = {
    "config a number": (text("config.json", "5"), r"config.json cannot be used: it holds a JSON int, not an object"),
    "config a list": (text("config.json", "[]"), r"it holds a JSON list, not an object"),
    "config null": (text("config.json", "null"), r"it holds a JSON NoneType, not an object"),
    "config very deep": (text("config.json", "[" * 100_000), r"it is not a valid JSON file: maximum recursion"),
    "config deep": (text("config.json", '{"a":' * 500 + "1" + "}" * 500), r"sections are nested more than 32"),
    "config large": (text("config.json", '{"a": "' + "x" * 100_000_000 + '"}'), r"more than the 16777216 that are"),
    "config of lists": (text("config.json", '{"a": [' + "[]," * 5_000_000 + "[]]}"), r"it has more than 500000 values"),
    "config a pipe": (pipe("config.json"), r"has no config.json"),
    "config a device": (device("config.json"), r"has no config.json"),
    "type a list": (config(model_type=[]), r"model_type is \[\], which must be a name"),
    "hub code": (
        config(attn_implementation="org/kernel"),
        r"attn_implementation is 'org/kernel', code of a hub",
    ),
    "inner type": (config(text_config__model_type={}), r"text_config.model_type is {}, which must be a name"),
    "architectures a number": (config(architectures=5), r"architectures is 5, which must be a list of names"),
    "architectures a name": (config(architectures="eight"), r"architectures is 'eight', which must be a list"),
    "no number": (config(downsample_ratio=float("nan")), r"NaN is no JSON number"),
    "infinite": (text("config.json", '{"model_type": "internvl", "a": 1e999}'), r"a is inf, which is no number"),
    "text for a number": (config(text_config__hidden_size="5"), r"Field 'hidden_size' expected int, got str"),
    "no heads": (config(text_config__num_attention_heads=0), r"num_attention_heads is 0, which must be at least 1"),
    "negative heads": (config(vision_config__num_attention_heads=-4), r"is -4, which must be at least 1"),
    "uneven heads": (config(text_config__num_attention_heads=5), r"5 attention heads, which do not divide its hidden"),
    "no head": (config(text_config__head_dim=0), r"head_dim of the language model is 0; correct it in config.json to"),
    "uneven groups": (config(text_config__num_key_value_heads=3), r"3 key-value heads, which do not divide its 4 att"),
    "no width": (config(text_config__hidden_size=0), r"text_config.hidden_size is 0, which must be at least 1"),
    "no layers": (config(vision_config__num_hidden_layers=0), r"num_hidden_layers is 0, which must be at least 1"),
    "many layers": (config(text_config__num_hidden_layers=10**9), r"is 1000000000, more than the 2000 that are taken"),
    "many tower layers": (config(vision_config__num_hidden_layers=10**4), r"is 10000, more than the 2000 that are"),
    "huge width": (config(text_config__intermediate_size=10**18), r"intermediate_size is 10+, more than the 1000000"),
    "many labels": (config(num_labels=10**9), r"num_labels is 1000000000, more than the 100000 that are taken"),
    "many parameters": (
        config(text_config__vocab_size=10**8, text_config__hidden_size=10**6, text_config__num_attention_heads=2),
        r"the model would have \d+ parameters, more than the 100000000000000 that are taken",
    ),
    "other configuration": (config(configuration_files=["config.4.0.0.json"]), r"other files by configuration_files"),
    "unknown activation": (config(projector_hidden_act="eight"), r"type 'internvl' cannot be built: KeyError: 'eight'"),
    "unknown dtype": (
        config(dtype="eight"),
        r"cannot read the configuration of model .*AttributeError: module 'torch'",
    ),
    "auto_map null": (config(auto_map=None), r"cannot read the configuration of model .*TypeError"),
    "no tile": (config(vision_config__image_size=[0, 0]), r"image_size\[\] is 0, which must be at least 1"),
    "huge tile": (config(vision_config__image_size=10**9), r"image_size is 1000000000, more than the 20000"),
    "uneven tile": (config(vision_config__image_size=[50, 50]), r"\(50, 50\) pixels cannot be cut into patches of \(7"),
    "ratio": (config(downsample_ratio=0.3), r"8 x 8 patches of a tile cannot be merged with downsample_ratio 0.3"),
    "channels": (config(vision_config__num_channels=4), r"num_channels is 4, but images have 3"),
    "small vocabulary": (config(text_config__vocab_size=100), r"token 469 but the model's vocab_size is 100; take"),
    "many tiles": (settings(_IMAGES, max_patches=10**9), r"max_patches is 1000000000, more than the 4096"),
    "most tiles": (settings(_IMAGES, max_patches=4096), r"into 1 to 4096 tiles; correct min_patches and max_patches"),
    "size of tiles": (settings(_IMAGES, size=[]), r"image processor of model .* cannot be"),
    "no deviation": (settings(_IMAGES, image_std=[0, 0, 0]), r"image_std .* \(0, 0, 0\), .* none is 0"),
    "resample": (settings(_IMAGES, resample=99), r"resample of the image processor is 99"),
    "images a list": (text(_IMAGES, "[]"), r"preprocessor_config.json cannot be used: it holds a JSON list"),
    "images a pipe": (pipe(_IMAGES), r"preprocessor_config.json cannot be used: it is a named pipe, not a regular fi"),
    "resample a list": (
        settings(_IMAGES, resample=[[]]),
        r"resample of the image processor is \[\[\]\], which has to be",
    ),
    "a mean too large": (
        settings(_IMAGES, image_mean=[10**400, 0.5, 0.5]),
        r"image_mean of the image processor is \(1000",
    ),
    "tokenizer empty": (text("tokenizer.json", "{}"), r"the tokenizer of model .* cannot be loaded: "),
    "tokenizer a list": (text("tokenizer.json", "[]"), r"the tokenizer of model .* cannot be loaded: "),
    "tokenizer of lists": (
        text("tokenizer.json", '{"model": [' + "[]," * 40_000_000 + "[]]}"),
        r"tokenizer.json cannot be used: it has more than 10000000 values",
    ),
    "tokenizer a device": (device("tokenizer.json"), r"tokenizer.json cannot be used: it is a device"),
    "template a pipe": (pipe("chat_template.jinja"), r"chat_template.jinja cannot be used: it is a named pipe"),
    "token a list": (settings(_TOKENIZER, start_image_token=[]), r"the tokenizer has no start_image_token"),
    "tokenizer settings": (text(_TOKENIZER, "null"), r"tokenizer_config.json cannot be used: it holds a JSON NoneType"),
    "special tokens": (text("special_tokens_map.json", "5"), r"special_tokens_map.json cannot be used"),
}


def endings(model: Path, which: Sequence[str] | int) -> dict[str, Ending]:
    """Return how the use of a copy of this model folder ended, for these of CASES or for as many random damages."""
    command = [sys.executable, "-P", "-m", "tests.values.hostile_models", str(model), json.dumps(which)]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT, env=environment, check=True)
    return {name: Ending(**ending) for name, ending in json.loads(done.stdout.splitlines()[-1]).items()}


def damaged(seed: int) -> Spoil:
    """Replace one to three random values of a random file by odd ones."""
    dice = random.Random(seed)

    def spoil(folder: Path) -> None:
        path = folder / dice.choice([name for name in FILES if (folder / name).exists()])
        document = json.loads(path.read_text())
        for _ in range(dice.randint(1, 3)):
            inner, key = dice.choice(list(_places(document)))
            inner[key] = dice.choice(ODD_VALUES)
        path.write_text(json.dumps(document))

    return spoil


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Return (container, key) pairs; of long containers, which are vocabularies, only some."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    for key in keys[:30]:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def _ending(model: Path, spoil: Spoil) -> Ending:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(shutil.copytree(model, Path(temporary) / "model"))
        spoil(folder)
        reader, writer = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(reader)
            _limit()
            os.write(writer, json.dumps(_uses(folder)).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as answer:
            found = answer.read()
        _, _, usage = os.wait4(process, 0)
    messages, raised = json.loads(found) if found else ([], [])
    return Ending(
        messages=messages,
        raised=raised,
        peak_bytes=usage.ru_maxrss << 10,
        seconds=time.monotonic() - begun,
        died=not found,
    )


def _limit() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, used + MOST_BYTES))
    signal.alarm(MOST_SECONDS)


def _uses(folder: Path) -> tuple[list[str], list[str]]:
    messages, raised = [], []
    section = ModelSection(path=str(folder), weights="random")
    for use in (
        lambda: model_shape(section),
        lambda: load_encoder(section, _DATA),
        lambda: chat.measurer(section.path),
    ):
        try:
            use()
        except ModelError as error:
            messages.append(str(error))
        except BaseException as error:
            raised.append(f"{type(error).__name__}: {error}")
    return messages, raised


if __name__ == "__main__":
    which = json.loads(sys.argv[2])
    spoils = (
        {str(seed): damaged(seed) for seed in range(which)}
        if isinstance(which, int)
        else {name: CASES[name][0] for name in which}
    )
    _uses(Path(sys.argv[1]))  # imports here, once, what each of the processes would import
    gc.freeze()  # else each of them would search all of it for garbage
    found = {name: asdict(_ending(Path(sys.argv[1]), spoil)) for name, spoil in spoils.items()}
    sys.stdout.write(json.dumps(found) + "\n")
