"""Videos whose frames are tiles: each frame is one vision unit, scaled to the size of a tile."""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers import PretrainedConfig
from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.video_utils import default_sample_indices_fn

from trials.arrays import Ints
from trials.data.records.sample import Clip, Video
from trials.data.records.videos import video_pixels
from trials.errors import DataError, ModelError
from trials.model.inputs.videos import (
    FILE,
    FramePreparation,
    PreparedVideo,
    VideoCount,
    check_volume,
    load_settings,
    metadata_of,
)

VIDEO_SIZE = -1
"""Height and width in the grid of a video, whose units are its frames."""
_USUAL_FRAMES = 32
"""Taken from a file where the settings say nothing, as LLaVA-OneVision was trained (its paper, section 4.2)."""
# Those of transformers' LlavaOnevisionVideoProcessor, for a folder without settings for videos.
_DEFAULTS: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_center_crop": False,
    "rescale_factor": 1 / 255,
    "resample": 3,
    "size": {"height": 384, "width": 384},
    "image_mean": OPENAI_CLIP_MEAN,
    "image_std": OPENAI_CLIP_STD,
    "num_frames": None,
    "fps": None,
}


class TileVideos:
    """Implementation of `VideoInputs` (trials/model/inputs/videos.py) for videos with one newline after all frames."""

    def __init__(self, path: str, config: PretrainedConfig, processor: Any) -> None:
        """Raise ModelError for settings of the folder `path` that contradict the model's."""
        self._settings = load_settings(path, _DEFAULTS)
        self._processor = copy.copy(processor)
        self._token: int = config.video_token_id
        self._tile: int = config.vision_config.image_size
        size, tile = self._settings["size"], {"height": self._tile, "width": self._tile}
        if size != tile:
            raise ModelError(
                f"the video processor makes frames of {str(size)[:60]} but the model takes {tile}; correct {FILE}"
            )
        for name in ("num_frames", "fps"):
            value = self._settings[name]
            if value is not None and (not isinstance(value, int | float) or not 0 < value <= 1_000_000):
                raise ModelError(f"{name} for videos is {str(value)[:40]}; correct it in {FILE} to a number above 0")
        self._frames = FramePreparation(self._settings)
        side = -(-(self._tile // config.vision_config.patch_size) // 2)
        made = self.count(Clip(frames=1, size=(1, 1), is_file=False)).width
        if made != side**2 + 1:
            raise ModelError(
                f"the processor shows a frame as {made - 1} tokens but the model makes {side**2} of it; correct "
                "num_image_tokens in processor_config.json"
            )

    @property
    def settings(self) -> Mapping[str, Any]:
        return self._settings

    @property
    def token(self) -> int:
        return self._token

    def chosen(self, clip: Clip) -> Ints:
        if not clip.is_file:
            return np.arange(clip.frames)
        fps, frames = clip.wanted_fps or self._settings["fps"], self._settings["num_frames"]
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
        check_volume(clip, frames, (self._tile, self._tile))
        token: str = self._processor.video_token
        text: str = self._processor.replace_video_token({"pixel_values_videos": [[None] * frames]}, 0)
        return VideoCount(text=token, width=text.count(token), units=frames)

    def prepared(self, clip: Clip, video: Video) -> PreparedVideo:
        chosen = self.chosen(clip)
        made = self._frames.prepared(video_pixels(video, chosen.tolist()), (self._tile, self._tile))
        grid = np.array([[len(made), VIDEO_SIZE, VIDEO_SIZE]], dtype=np.int64)
        return PreparedVideo(pixels=made.numpy(), grid=grid, seconds=0.0)
