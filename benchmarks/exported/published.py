"""Models that trainers take for published ones, and conversations with pictures for them."""

import json
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image, ImageDraw

from benchmarks.devices.models import rewrite

_IDS = {"<|vision_start|>": 151_652, "<|vision_end|>": 151_653, "<|image_pad|>": 151_655, "<|video_pad|>": 151_656}
_VOCABULARY = 151_936
_WORDS = [
    "what",
    "is",
    "in",
    "the",
    "picture",
    "a",
    "red",
    "circle",
    "and",
    "two",
    "green",
    "squares",
    "on",
    "the",
    "left",
]
_COLOURS = ("red", "green", "blue", "black", "orange")


def number_as_published(model: Path) -> None:
    """Number the tokens of images and videos as Qwen's tokenizers do, by which ms-swift finds them."""
    rewrite(model / "tokenizer.json", _with_published_ids)
    ids = {"image_token_id": _IDS["<|image_pad|>"], "video_token_id": _IDS["<|video_pad|>"]}
    ids |= {f"vision_{end}_token_id": _IDS[f"<|vision_{end}|>"] for end in ("start", "end")}
    rewrite(model / "config.json", lambda config: config.update(ids))
    rewrite(model / "config.json", lambda config: config["text_config"].update(vocab_size=_VOCABULARY))


def _with_published_ids(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["vocab"].update(_IDS)
    for token in tokenizer["added_tokens"]:
        token["id"] = _IDS.get(token["content"], token["id"])


def write_conversations(folder: Path, count: int) -> Path:
    """Write conversations with no picture, one or several, of one turn or more, some with a system prompt."""
    random = Random(0)
    (folder / "images").mkdir()
    lines = [json.dumps(_record(random, folder / "images", number)) for number in range(count)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    return folder / "data.jsonl"


def _record(random: Random, folder: Path, number: int) -> dict[str, Any]:
    def said(most: int) -> str:
        return " ".join(random.choices(_WORDS, k=random.randint(1, most)))

    names = [f"{number}-{each}.png" for each in range(random.choice((0, 1, 1, 1, 2, 3)))]
    for name in names:
        _draw(folder / name, random.randint(70, 480), random.randint(70, 480))
    turns = [{"role": "system", "content": said(6)}] if number % 8 == 7 else []
    for turn in range(random.choice((1, 1, 2))):
        shown = "".join("<image>\n" for _ in names) if not turn else ""
        turns += [{"role": "user", "content": shown + said(12)}, {"role": "assistant", "content": said(40)}]
    return {"messages": turns, **({"images": [str(folder / name) for name in names]} if names else {})}


def _draw(file: Path, width: int, height: int) -> None:
    """Draw circles, whose edges show how a trainer makes a picture smaller."""
    random = Random(file.name)
    picture = Image.new("RGB", (width, height), "white")
    canvas = ImageDraw.Draw(picture)
    for _ in range(12):
        left, top, size = random.randrange(width), random.randrange(height), random.randint(5, 90)
        canvas.ellipse((left, top, left + size, top + size), fill=random.choice(_COLOURS))
    picture.save(file)
