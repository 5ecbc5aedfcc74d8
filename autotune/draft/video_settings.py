"""Arguments on videos as lines of the file of a model folder that decides on them."""

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from trials.model.inputs.video_limits import FILE_OF_ALL, VIDEO_FILE, VIDEO_PART

_KEYS = {
    "fps": "fps",
    "video_fps": "fps",
    "fps_min_frames": "min_frames",
    "video_min_frames": "min_frames",
    "fps_max_frames": "max_frames",
    "video_max_frames": "max_frames",
    "video_maxlen": "max_frames",
    "nframes": "num_frames",
    "num_frames": "num_frames",
    "video_min_pixels": "size.shortest_edge",
    "video_max_pixels": "size.longest_edge",
}
"""Key of the file by argument; trainers have variables of the same names in capitals."""
ARGUMENTS = _KEYS.keys()


def video_note(values: Mapping[str, Any], stated: Collection[str]) -> tuple[str, frozenset[str]]:
    """Return the note with the lines to write, and the arguments that it is about; nothing where none is `stated`."""
    found = {name: number for name in _KEYS if (number := _number(values.get(name))) is not None}
    if not found.keys() & set(stated):
        return "", frozenset()
    written: dict[str, Any] = {}
    for name, number in found.items():
        key, _, edge = _KEYS[name].partition(".")
        written[key] = {**written.get(key, {}), edge: number} if edge else number
    pairs = ", ".join(f"{name} is {_KEYS[name]}" for name in sorted(found) if name != _KEYS[name])
    note = (
        f"Videos: for the same frames, write {json.dumps(written)} into {VIDEO_FILE} of the model folder, or into "
        f"{VIDEO_PART} of its {FILE_OF_ALL} where that is there{f' ({pairs})' if pairs else ''}. Give both "
        "edges of size: it bounds each frame for Qwen2-VL and Qwen2.5-VL, all frames together for Qwen3-VL and GLM, "
        "and enlarges small ones. `autotune doctor JOB` shows what holds"
    )
    return note, frozenset(found)


def _number(value: object) -> int | float | None:
    """Return a number that a configuration or a script states; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() else number
