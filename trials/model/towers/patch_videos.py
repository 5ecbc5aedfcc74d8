"""Videos as patches: `temporal_patch_size` frames form one layer of patches, which attend only to each other."""

import copy
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from trials.arrays import Ints
from trials.data.records.images import MOST_PIXELS
from trials.data.records.sample import Clip, Video
from trials.data.records.videos import video_pixels
from trials.errors import DataError, ModelError
from trials.model.inputs.patched_videos import USUAL_FPS, VideoRules
from trials.model.inputs.video_limits import VideoLimits, VideoSettings, video_settings
from trials.model.inputs.videos import (
    FramePreparation,
    PreparedVideo,
    VideoCount,
    check_volume,
    is_number,
    keys,
    load_settings,
    metadata_of,
    wrong_setting,
)

_PATCHES = ("patch_size", "temporal_patch_size", "merge_size")
_BOUNDS = ("shortest_edge", "longest_edge")
"""Of the pixels of a frame, or of all frames of a video."""
_WHOLE = ("min_frames", "max_frames", "max_video_tokens", "max_duration")
# A choice: no video has as many frames or pixels, and larger numbers would overflow later.
_LARGEST = 1 << 40


class PatchVideos:
    """Implementation of `VideoInputs` (trials/model/inputs/videos.py)."""

    def __init__(self, path: str, config: PretrainedConfig, processor: Any, rules: VideoRules) -> None:
        """Raise ModelError for settings of the folder `path` that contradict the model's."""
        self._rules = rules
        self.settings = _sized(load_settings(path, rules.defaults))
        self._stated = video_settings(path)
        _check(self.settings, config, self._stated)
        if rules.whole_layers:
            _check_layers(self.settings, self._stated)
        self._frames = FramePreparation(self.settings, self._stated)
        # The text depends on sizes of the video processor, which itself needs torchvision.
        self._processor = copy.copy(processor)
        self._processor.video_processor = SimpleNamespace(**{name: self.settings[name] for name in _PATCHES})
        # In the text a layer of frames has a token of its own, by which it is found.
        self._processor.image_token = self._processor.video_token
        self.token: int = config.image_token_id if rules.as_images else config.video_token_id

    @property
    def limits(self) -> VideoLimits:
        settings, size = self.settings, self.settings["size"]
        fps, least = settings["fps"], None
        if "max_duration" in settings:  # frames at a rate alone, and of longer videos as many
            most = int(settings["max_duration"] * fps)
        elif (count := settings["num_frames"]) is not None:
            fps, least, most = None, count, count
        else:
            most = settings["max_frames"]
            least = min(settings["min_frames"], most)  # as many at most are taken, as in transformers
        return VideoLimits(
            fps=fps,
            min_frames=least,
            max_frames=most,
            min_pixels=size["shortest_edge"],
            max_pixels=size["longest_edge"],
            is_of_frame=self._rules.is_of_frame,
            samples=bool(self._stated.values.get("do_sample_frames", self._rules.samples)),
            file=self._stated.file,
            **keys(self._stated, self._rules.defaults),
        )

    def chosen(self, clip: Clip) -> Ints:
        if not clip.is_file:
            most = self.settings.get("max_frames", clip.frames)
            if clip.frames > most:
                raise DataError(
                    f"a video has {clip.frames} frames, more than the {most} that the model takes; leave some out, or "
                    f"raise max_frames in {self._stated}"
                )
            return np.arange(clip.frames)
        return self._rules.sampled(clip, self.settings)

    def count(self, clip: Clip) -> VideoCount:
        frames, height, width = self._grid(clip)
        merged = self.settings["merge_size"]
        # One merged patch for each layer: the text around it does not depend on their number.
        inputs = {
            "video_grid_thw": np.array([[frames, merged, merged]]),
            "video_metadata": [metadata_of(clip, self.chosen(clip), USUAL_FPS)],
        }
        of_layer = height * width // merged**2
        text: str = self._processor.replace_video_token(inputs, 0)
        return VideoCount(text=text, width=of_layer, units=frames * of_layer)

    def prepared(self, clip: Clip, video: Video) -> PreparedVideo:
        grid, chosen = self._grid(clip), self.chosen(clip)
        side, together = self.settings["patch_size"], self.settings["temporal_patch_size"]
        made = self._frames.prepared(video_pixels(video, chosen.tolist()), (grid[1] * side, grid[2] * side))
        return PreparedVideo(
            pixels=self._patches(made, grid).numpy(),
            grid=np.array([grid], dtype=np.int64),
            seconds=together / metadata_of(clip, chosen, USUAL_FPS).sampled_fps,
        )

    def _grid(self, clip: Clip) -> tuple[int, int, int]:
        """Return (layers, height, width) in patches."""
        try:
            frames = len(self.chosen(clip))
            size = self._rules.resized(frames, clip.size, self.settings)
        except ValueError as error:
            raise DataError(
                f"the model's processor refuses a video of {clip.frames} frames of {clip.size[1]} x {clip.size[0]} "
                f"pixels: {error}"
            ) from error
        check_volume(clip, frames, size, self._stated)
        side, together = self.settings["patch_size"], self.settings["temporal_patch_size"]
        return math.ceil(frames / together), size[0] // side, size[1] // side

    def _patches(self, frames: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
        """Return [units, merged patches, values] of frames [frames, 3, height, width]; missing ones repeat the last."""
        side, together, merged = (self.settings[name] for name in _PATCHES)
        missing = grid[0] * together - len(frames)
        whole = torch.cat([frames, frames[-1:].expand(missing, -1, -1, -1)])
        parts = whole.view(
            grid[0], together, 3, grid[1] // merged, merged, side, grid[2] // merged, merged, side
        )  # fmt: skip
        ordered = parts.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        return ordered.reshape(-1, merged**2, 3 * together * side**2)


def _sized(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with the bounds of `size`, which older folders have under names of their own."""
    size = dict(settings["size"]) if isinstance(settings["size"], Mapping) else {}
    for name, older in zip(_BOUNDS, ("min_pixels", "max_pixels"), strict=True):
        if settings.get(older) is not None:
            size[name] = settings[older]
    return {**settings, "size": size}


def _check(settings: Mapping[str, Any], config: PretrainedConfig, stated: VideoSettings) -> None:
    vision = config.vision_config
    made = tuple(settings[name] for name in _PATCHES)
    taken = (vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size)
    if made != taken:
        raise ModelError(
            f"the video processor makes patches of (size, frames, merged) {made} but the model takes {taken}; correct "
            f"{stated}"
        )
    bounds = {name: settings["size"].get(name) for name in _BOUNDS}
    whole = bounds | {name: settings[name] for name in _WHOLE if name in settings}
    for name, value in whole.items():
        if not isinstance(value, int) or not is_number(value, _LARGEST):
            raise wrong_setting(name, value, "a whole number above 0", stated)
    rate, count = settings["fps"], settings.get("num_frames")
    if not is_number(rate, _LARGEST):
        raise wrong_setting("fps", rate, "a number above 0", stated)
    if count is not None and (not isinstance(count, int) or not 1 <= count <= settings["max_frames"]):
        raise wrong_setting("num_frames", count, "a number from 1 to max_frames", stated)
    if bounds["shortest_edge"] > MOST_PIXELS:
        raise wrong_setting("shortest_edge", bounds["shortest_edge"], f"at most {MOST_PIXELS} pixels", stated)
    least, most = _BOUNDS
    if bounds[least] > bounds[most]:
        raise ModelError(
            f"{least} for videos is {bounds[least]} but {most} is {bounds[most]}; correct one of them in {stated}, or "
            "write it there if it is not"
        )


def _check_layers(settings: Mapping[str, Any], stated: VideoSettings) -> None:
    """Raise ModelError where no video would have the frames of a layer, of which whole ones are taken."""
    least = settings["temporal_patch_size"]
    for name in ("max_frames", "num_frames"):
        value = settings[name]
        if value is not None and value < least:
            raise wrong_setting(name, value, f"at least {least}, the frames of a layer", stated)
