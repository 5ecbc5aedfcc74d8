"""Videos whose frames are tiles: each frame is one vision unit, scaled to the size of a tile."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PretrainedConfig
from transformers.image_transforms import get_resize_output_image_size
from transformers.image_utils import ChannelDimension
from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.video_utils import default_sample_indices_fn

from trials.arrays import Ints
from trials.data.records.sample import Clip, Video
from trials.data.records.videos import video_pixels
from trials.errors import DataError, ModelError
from trials.model.inputs.image_settings import shown_setting
from trials.model.inputs.video_limits import VideoLimits, video_settings
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

VIDEO_SIZE = -1
"""Height and width in the grid of a video, whose units are its frames."""
_USUAL_FRAMES = 32
"""Taken from a file where the settings say nothing, as LLaVA-OneVision was trained (its paper, section 4.2)."""
# Those that transformers' video processors of these models share, for a folder without settings for videos.
_SHARED: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "rescale_factor": 1 / 255,
    "resample": 3,
    "image_mean": OPENAI_CLIP_MEAN,
    "image_std": OPENAI_CLIP_STD,
    "num_frames": None,
    "fps": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TileRules:
    """What differs between models whose frames are tiles."""

    defaults: Mapping[str, Any]
    """Settings that a model folder may leave out."""
    side: Callable[[PretrainedConfig, int], int]
    """(configuration, patches in a row of a tile) -> tokens of a frame in a row."""
    ends: int
    """Tokens behind all frames of a video."""


ONEVISION = TileRules(
    defaults={**_SHARED, "do_center_crop": False, "size": {"height": 384, "width": 384}, "crop_size": None},
    side=lambda _, patches: -(-patches // 2),
    ends=1,
)
"""LlavaOnevisionVideoProcessor of transformers"""
NEXT = TileRules(
    defaults={
        **_SHARED,
        "do_center_crop": True,
        "size": {"shortest_edge": 224},
        "crop_size": {"height": 224, "width": 224},
    },
    side=lambda config, patches: patches // int(config.spatial_pool_stride),
    ends=0,
)
"""LlavaNextVideoVideoProcessor of transformers"""


class TileVideos:
    """Implementation of `VideoInputs` (trials/model/inputs/videos.py)."""

    def __init__(self, path: str, config: PretrainedConfig, processor: Any, rules: TileRules) -> None:
        """Raise ModelError for settings of the folder `path` that contradict the model's."""
        self.settings = load_settings(path, rules.defaults)
        self._stated = video_settings(path)
        self._known = rules.defaults.keys()
        self._processor = copy.copy(processor)
        self.token: int = config.video_token_id
        self._tile: int = config.vision_config.image_size
        self._check_size()
        for name in ("num_frames", "fps"):
            value = self.settings[name]
            if value is not None and not is_number(value, 1_000_000):
                raise wrong_setting(name, value, "a number above 0", self._stated)
        self._frames = FramePreparation(self.settings, self._stated, may_crop=True)
        side = rules.side(config, self._tile // config.vision_config.patch_size)
        made = self.count(Clip(frames=1, size=(1, 1), is_file=False)).width - rules.ends
        if made != side**2:
            raise ModelError(
                f"the processor shows a frame as {made} tokens but the model makes {side**2} of it; correct "
                "num_image_tokens or patch_size in processor_config.json"
            )

    @property
    def limits(self) -> VideoLimits:
        fps, count = self.settings["fps"], self.settings["num_frames"]
        least = None if count is None else int(count)
        return VideoLimits(
            fps=fps,
            min_frames=least,
            max_frames=_USUAL_FRAMES if fps is None and count is None else least,
            min_pixels=None,
            max_pixels=None,
            is_of_frame=True,
            samples=bool(self._stated.values.get("do_sample_frames", False)),
            file=self._stated.file,
            **keys(self._stated, self._known),
        )

    def _check_size(self) -> None:
        """Raise ModelError for frames of another size than the tower's tiles."""
        crops, tile = self.settings["do_center_crop"], {"height": self._tile, "width": self._tile}
        made, size = self.settings["crop_size" if crops else "size"], self.settings["size"]
        if made != tile:
            raise ModelError(
                f"the video processor makes frames of {shown_setting(made)} but the model takes {tile}; correct "
                f"{self._stated}"
            )
        edges = list(size.values()) if isinstance(size, Mapping) else []
        if (
            not edges
            or set(size) not in ({"shortest_edge"}, set(tile))
            or not all(isinstance(edge, int) and edge >= self._tile for edge in edges)
        ):
            raise ModelError(
                f"the video processor scales frames to {shown_setting(size)}, of which the middle {tile} is taken; "
                f"correct {self._stated} to a shortest_edge, or a height and width, of at least {self._tile}"
            )

    def _resized(self, clip: Clip) -> tuple[int, int]:
        """Return the (height, width) to which frames are scaled."""
        size = self.settings["size"]
        if "shortest_edge" not in size:
            return size["height"], size["width"]
        height, width = get_resize_output_image_size(
            np.broadcast_to(np.uint8(0), (3, *clip.size)),
            size["shortest_edge"],
            default_to_square=False,
            input_data_format=ChannelDimension.FIRST,
        )
        return height, width

    def chosen(self, clip: Clip) -> Ints:
        if not clip.is_file:
            return np.arange(clip.frames)
        fps, frames = clip.wanted_fps or self.settings["fps"], self.settings["num_frames"]
        if clip.wanted_fps:
            frames = None
        elif fps is None and frames is None:
            frames = min(_USUAL_FRAMES, clip.frames)
        try:
            found: Ints = default_sample_indices_fn(metadata_of(clip, np.arange(0)), num_frames=frames, fps=fps)
        except ValueError as error:
            raise DataError(f"the model's processor refuses a video of {clip.frames} frames: {error}") from error
        return found

    def count(self, clip: Clip) -> VideoCount:
        frames = len(self.chosen(clip))
        check_volume(clip, frames, self._resized(clip), self._stated)
        token: str = self._processor.video_token
        shape = (frames, 3, self._tile, self._tile)
        pixels = np.broadcast_to(np.float32(0), shape)
        text: str = self._processor.replace_video_token({"pixel_values_videos": [pixels]}, 0)
        return VideoCount(text=token, width=text.count(token), units=frames)

    def prepared(self, clip: Clip, video: Video) -> PreparedVideo:
        chosen = self.chosen(clip)
        tile = self._tile, self._tile
        made = self._frames.prepared(video_pixels(video, chosen.tolist()), self._resized(clip), tile)
        grid = np.array([[len(made), VIDEO_SIZE, VIDEO_SIZE]], dtype=np.int64)
        return PreparedVideo(pixels=made.numpy(), grid=grid, seconds=0.0)
