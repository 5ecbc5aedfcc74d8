"""Settings of a model's images and videos, and the cutoff, as `--what-if` names and changes them."""

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import PackError
from trials.errors import ModelError
from trials.job import Job
from trials.model.hub import folder_of
from trials.model.inputs.encoders import load_measurer
from trials.model.inputs.video_limits import FILE_OF_ALL, IMAGE_FILE, VIDEO_FILE, VIDEO_PART

CUTOFF = "cutoff"
"""Tokens to which samples are cut, as `oversize: truncate` does."""
_IMAGES = ((IMAGE_FILE, None), (FILE_OF_ALL, "image_processor"))
"""Files with settings of images, and the key of these in a file of several processors."""
_OF_IMAGES = {
    "max_pixels": ("max_pixels", "size.longest_edge"),
    "min_pixels": ("min_pixels", "size.shortest_edge"),
    "max_tiles": ("max_patches",),
}
"""Names of each setting of images in the files of different models."""
_EDGE_OF = {"video_max_pixels": "longest_edge", "video_min_pixels": "shortest_edge"}
_OLDER = {"longest_edge": "max_pixels", "shortest_edge": "min_pixels"}
"""Names of the edges outside of `size`, which count where a file has both."""
_OF_VIDEOS = {
    "frames": "num_frames",
    "fps": "fps",
    "max_frames": "max_frames",
    "min_frames": "min_frames",
    **dict.fromkeys(_EDGE_OF, "size"),
}
"""The key of each setting of videos."""
_RESOLUTIONS = "image_grid_pinpoints"
NAMES = (*_OF_IMAGES, *_OF_VIDEOS, CUTOFF)


def checked_settings(settings: Mapping[str, float] | str) -> dict[str, float]:
    """Return settings, or those of a text with NAME=VALUE pairs and commas between. Raise PackError for others."""
    if not isinstance(settings, str | Mapping):
        raise PackError(f"what if: settings are a mapping or a text with NAME=VALUE, not {settings!r}")
    pairs = [_pair(each) for each in settings.split(",")] if isinstance(settings, str) else [*settings.items()]
    found: dict[str, float] = {}
    for name, value in pairs:
        if name not in NAMES:
            raise PackError(f"what if: {str(name)!r} is no setting; give NAME=VALUE with one of {', '.join(NAMES)}")
        if name in found:
            raise PackError(f"what if: {name} is given twice; compare its values as two variants")
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not (math.isfinite(number) and (name == "fps" or number.is_integer())):
            kind = "a number" if name == "fps" else "a whole number"
            raise PackError(f"what if: {name} is {value!r} and has to be {kind}; give {name}=2, say")
        found[name] = int(number) if number.is_integer() else number
        if not 0 < number < 1 << 31:
            raise PackError(f"what if: {name} is {value} and has to be above 0 and below 2^31; give {name}=2, say")
    return found


def _pair(text: str) -> tuple[str, Any]:
    name, _, value = (part.strip() for part in text.partition("="))
    return name, value


def settings_text(settings: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """What a job's model says of images and videos."""

    job: Job
    videos: Mapping[str, Any]
    """Settings of its video processor as they are read, with defaults for what its folder leaves out; empty where it
    takes no videos."""

    @classmethod
    def of(cls, job: Job) -> "ModelSettings":
        """Raise ModelError for a model whose processor cannot be used."""
        return cls(job=job, videos=load_measurer(job.model, job.data).video_settings)

    def check(self, settings: Mapping[str, float]) -> None:
        """Raise PackError for settings that the model's processors do not have, do not read, or refuse."""
        of_files = _of_files(settings)
        self._check_rate(of_files)
        try:
            together = self._digest(of_files)
        except ModelError as error:
            raise PackError(f"what if: {settings_text(of_files)} cannot be followed: {error}") from error
        for name, value in of_files.items():
            with suppress(ModelError):  # what cannot be left out is read
                if self._digest({other: of_files[other] for other in of_files if other != name}) == together:
                    raise PackError(
                        f"what if: {name}={value} changes nothing: the processors of {self.job.model.path} have it "
                        "already, or do not read it; leave it out"
                    )

    @contextmanager
    def changed(self, settings: Mapping[str, float]) -> Iterator[str]:
        """Give a folder of links to the files of the model, with other settings of its processors.

        Raise PackError for settings that the model does not have.
        """
        of_files = _of_files(settings)
        if not of_files:
            yield self.job.model.path
            return
        source = Path(folder_of(self.job.model.path))
        names = (IMAGE_FILE, VIDEO_FILE, FILE_OF_ALL)
        files = {name: json.loads(source.joinpath(name).read_bytes()) for name in names if (source / name).is_file()}
        self._check_known(of_files, files)
        # Those of images first: where the folder has none for videos, these are prepared by them, too.
        for name in (name for name in _OF_IMAGES if name in of_files):
            for holder, key in _image_holders(files, name):
                holder[key] = of_files[name]
        for name in (name for name in _OF_VIDEOS if name in of_files):
            for holder in _video_holders(files):
                self._set(holder, name, of_files[name])
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made, source.name)
            folder.mkdir()
            for file in source.iterdir():
                if file.name not in files:
                    folder.joinpath(file.name).symlink_to(file.resolve())
            for name, contents in files.items():
                folder.joinpath(name).write_text(json.dumps(contents))
            yield str(folder)

    def _check_rate(self, settings: Mapping[str, float]) -> None:
        """Raise PackError for fps together with a number of frames, which takes precedence in every video processor."""
        own = self.videos.get("num_frames")
        if "fps" in settings and ("frames" in settings or own is not None):
            counts = f"frames={settings['frames']}" if "frames" in settings else f"num_frames: {own} of the model"
            raise PackError(
                f"what if: fps={settings['fps']} changes nothing, as {counts} takes precedence; leave it out"
            )

    def _check_known(self, settings: Mapping[str, float], files: Mapping[str, Any]) -> None:
        known = [name for name in _OF_IMAGES if any(_image_holders(files, name))]
        known += [name for name in _OF_VIDEOS if self._reads(name)]
        if unknown := next((name for name in settings if name not in known), None):
            raise PackError(
                f"what if: {unknown}: the processors of {self.job.model.path} have no such setting; give one of "
                f"{', '.join((*known, CUTOFF))}{_of_resolutions(files, unknown)}"
            )

    def _reads(self, name: str) -> bool:
        """Return whether the model's video processor has a setting of videos."""
        key = _OF_VIDEOS[name]
        # Of a size, both edges bound pixels, and one alone is the length of an edge.
        return key in self.videos and (name not in _EDGE_OF or _OLDER.keys() <= self.videos[key].keys())

    def _set(self, holder: dict[str, Any], name: str, value: float) -> None:
        key = _OF_VIDEOS[name]
        if edge := _EDGE_OF.get(name):
            holder[key] = {**self.videos[key], **(holder.get(key) or {}), edge: value}
            if holder.get(_OLDER[edge]) is not None:
                holder[_OLDER[edge]] = value
        elif self.videos[key] != value:  # 2 is 2.0, in another spelling
            holder[key] = value

    def _digest(self, settings: Mapping[str, float]) -> str:
        """Return the digest of what lengths depend on. Raise ModelError for settings that a processor refuses."""
        with self.changed(settings) as path:
            try:
                measurer = load_measurer(self.job.model.model_copy(update={"path": path}), self.job.data)
                if self.videos and (refusal := measurer.no_videos):
                    raise refusal
            except ModelError as error:
                raise ModelError(str(error).replace(path, self.job.model.path)) from error
            return measurer.digest


def _of_files(settings: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in settings.items() if name != CUTOFF}


def _image_holders(files: Mapping[str, Any], name: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield where a setting of images stands in the files of a model: mappings, and its key in each."""
    for file, part in _IMAGES:
        settings: dict[str, Any] = files.get(file, {})
        settings = settings.get(part) or {} if part else settings
        for path in _OF_IMAGES[name]:
            *outer, key = path.split(".")
            holder = settings.get(outer[0]) or {} if outer else settings
            if holder.keys() >= _OLDER.keys() if outer else key in holder:
                yield holder, key


def _video_holders(files: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the settings of videos in the files of a model.

    A folder without any gets the file for them, with those of images, which prepare videos as long as it is not there.
    """
    nested = files.get(FILE_OF_ALL, {}).get(VIDEO_PART)
    if nested is None:
        yield files.setdefault(VIDEO_FILE, json.loads(json.dumps(files.get(IMAGE_FILE, {}))))
    else:
        yield nested


def _of_resolutions(files: Mapping[str, Any], name: str) -> str:
    """Return what to change instead where images are cut to one of a list of resolutions, as in LLaVA-OneVision."""
    parts = (files.get(file, {}).get(part) if part else files.get(file) for file, part in _IMAGES)
    if name not in _OF_IMAGES or not any(part and _RESOLUTIONS in part for part in parts):
        return ""
    return (
        f". Its images are cut by {_RESOLUTIONS}, which the model reads too: change it in config.json and "
        f"{IMAGE_FILE} of a copy of the model folder, and compare with `autotune pack JOB --set model.path=COPY`"
    )
