"""Videos as a model's own video processor prepares them, which needs torchvision; this module needs torch alone."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate
from transformers.processing_utils import VideosKwargs
from transformers.video_processing_utils import VideoProcessorMixin
from transformers.video_utils import VideoMetadata

from trials.arrays import Ints
from trials.data.records.images import MOST_PIXELS
from trials.data.records.sample import Clip, Video
from trials.errors import DataError, ModelError
from trials.model.inputs.image_settings import shown_setting
from trials.model.inputs.video_limits import IMAGE_FILE, VIDEO_FILE, VideoLimits, VideoSettings

_MODES = {2: "bilinear", 3: "bicubic"}
"""Names in torch of Pillow's numbers for resampling."""
_STEPS = ("do_resize", "do_rescale", "do_normalize")
_IMAGE_KEYS = {"min_pixels", "max_pixels"}
_OF_VIDEOS = re.compile(r"(?!_)(?!.*_(type|class)$).*(fps|frame|pixel|video|edge)", re.IGNORECASE)
"""Keys that are meant for videos, of whatever program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoCount:
    """How a video appears in the text, and how many vision units it has."""

    text: str
    """Text that the processor writes for it; each video token in it represents `width` tokens."""
    width: int
    units: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedVideo:
    """A video as the vision tower takes it."""

    pixels: NDArray[np.float32]
    """[units, *unit_shape]"""
    grid: Ints
    """[1, G] (see `PackTokens`)"""
    seconds: float
    """Between two positions in time, for models whose positions follow it."""


class VideoInputs(Protocol):
    """A family's videos: their text, and the inputs of the vision tower."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What lengths of videos depend on in addition to the model's processor."""

    @property
    def limits(self) -> VideoLimits:
        """What of the settings decides on the frames of video files."""

    @property
    def token(self) -> int:
        """Id of the token whose places the features of videos take."""

    def count(self, clip: Clip) -> VideoCount:
        """Return what the processor makes of a video. Raise DataError for one that it refuses."""

    def prepared(self, clip: Clip, video: Video) -> PreparedVideo:
        """Return the video's pixels. Raise DataError for one that cannot be decoded."""

    def chosen(self, clip: Clip) -> Ints:
        """Return the numbers of the frames that are used, in ascending order."""


def load_settings(path: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model folder's video processor, with `defaults` where it says nothing.

    Raise ModelError for a folder without them.
    """
    try:
        found, _ = VideoProcessorMixin.get_video_processor_dict(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"the folder has no settings of a video processor ({VIDEO_FILE}): {error}") from error
    return {name: found[name] if found.get(name) is not None else value for name, value in defaults.items()}


def keys(stated: VideoSettings, defaults: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return `VideoLimits.read` and `unknown` of what a folder states; `defaults` are the keys that are read."""
    known = {*defaults, *VideosKwargs.__annotations__, *(_IMAGE_KEYS if stated.file == IMAGE_FILE else ())}
    return {
        "read": tuple(key for key in defaults if key == "size" or _OF_VIDEOS.match(key)),
        "unknown": tuple(sorted(key for key in stated.values if key not in known and _OF_VIDEOS.match(key))),
    }


def wrong_setting(name: str, value: object, expected: str, stated: VideoSettings) -> ModelError:
    """Return the error of a setting that no video can be prepared with."""
    return ModelError(f"{name} for videos is {shown_setting(value)}; correct it in {stated} to {expected}")


def is_number(value: object, most: float) -> bool:
    """Return whether a setting is a number above 0, and `most` at most."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= most


def metadata_of(clip: Clip, chosen: Ints, usual_fps: float | None = None) -> VideoMetadata:
    """Return how transformers describes the chosen frames of a video; `usual_fps` is for frames without a rate."""
    return VideoMetadata(total_num_frames=clip.frames, fps=clip.fps or usual_fps, frames_indices=chosen.tolist())


def check_volume(clip: Clip, frames: int, size: tuple[int, int], stated: VideoSettings) -> None:
    """Raise DataError for a video whose prepared frames of (height, width) hold too many pixels."""
    pixels = frames * size[0] * size[1]
    if pixels > MOST_PIXELS:
        raise DataError(
            f"a video of {clip.size[1]} x {clip.size[0]} pixels would be prepared as {frames} frames of {size[1]} x "
            f"{size[0]}, {pixels} pixels, more than the {MOST_PIXELS} that are taken; give fewer or smaller frames, or "
            f"set cap_pixels_per_frame, size or fps in {stated}"
        )


class FramePreparation:
    """Frames resized and normalised with the same functions of torch that transformers' video processors call."""

    def __init__(self, settings: Mapping[str, Any], stated: VideoSettings, *, may_crop: bool = False) -> None:
        """Raise ModelError for steps that are left out, added, or done in another way."""
        faults = [f"{name} is false" for name in _STEPS if not settings[name]]
        mode = next((name for number, name in _MODES.items() if number == settings["resample"]), None)
        if settings["do_center_crop"] and not may_crop:
            faults.append("do_center_crop is true")
        if mode is None:
            faults.append(f"resample is {shown_setting(settings['resample'])}")
        if mode is None or faults:
            raise ModelError(f"{faults[0]} for videos, which is not supported; correct {stated}")
        self._mode = mode
        factor, mean, std = (settings[name] for name in ("rescale_factor", "image_mean", "image_std"))
        try:
            self._mean, self._std = (torch.tensor(values).view(3, 1, 1) * (1.0 / factor) for values in (mean, std))
        except (TypeError, ValueError, RuntimeError, ZeroDivisionError):
            self._std = torch.zeros(1)
        if not self._std.all() or not (self._mean / self._std).isfinite().all():
            raise ModelError(
                f"image_mean {shown_setting(mean)}, image_std {shown_setting(std)} and rescale_factor "
                f"{shown_setting(factor)} for videos are not 3, 3 and 1 numbers of which none divides by 0; correct "
                f"{stated}"
            )

    def prepared(
        self, frames: Iterable[NDArray[np.uint8]], size: tuple[int, int], middle: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """Return pixels float32 [frames, 3, height, width] of frames [height, width, 3] in the `size` given.

        Of these, `middle` is the (height, width) that is kept, where it is given.
        """
        kept = tuple(_middle(*each) for each in zip(size, middle or size, strict=True))
        resized = torch.cat([self._resized(frame, size)[..., kept[0], kept[1]] for frame in frames])
        return resized.float().sub_(self._mean).div_(self._std)

    def _resized(self, frame: NDArray[np.uint8], size: tuple[int, int]) -> torch.Tensor:
        pixels = torch.from_numpy(np.ascontiguousarray(frame.transpose(2, 0, 1)))[None]
        if pixels.shape[-2:] == size:
            return pixels
        return interpolate(pixels, size=size, mode=self._mode, align_corners=False, antialias=True)


def _middle(length: int, kept: int) -> slice:
    """Return the `kept` places in the middle of `length`."""
    start = (length - kept) // 2
    return slice(start, start + kept)
