"""Videos of Qwen's and GLM's models: which frames are taken, and their prepared size.

Sources: the video processors of Qwen2-VL (Qwen2.5-VL has the same), Qwen3-VL and GLM-4.1V in transformers. Defaults for
files of Qwen's are those of qwen-vl-utils, with which Qwen trains.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.models.glm4v.video_processing_glm4v import smart_resize as resized_evenly
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as resized_image
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as resized_video
from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from trials.arrays import Ints
from trials.data.records.sample import Clip

USUAL_FPS = 2.0
"""Frames per second of frames that are given as images, and taken from files, where no other rate is given."""
# Defaults that the video processors in transformers share, for folders without them.
_SHARED: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_center_crop": False,
    "rescale_factor": 1 / 255,
    "resample": 3,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
# Those of Qwen's, which GLM's does not read.
_OF_QWEN: dict[str, Any] = {
    **_SHARED,
    "min_frames": 4,
    "max_frames": 768,
    "num_frames": None,
    "cap_pixels_per_frame": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoRules:
    """What differs between the video processors of models whose vision units are merged patches."""

    defaults: Mapping[str, Any]
    """Settings that a model folder may leave out."""
    sampled: Callable[[Clip, Mapping[str, Any]], Ints]
    """(a file, settings) -> numbers of the frames that are taken."""
    resized: Callable[[int, tuple[int, int], Mapping[str, Any]], tuple[int, int]]
    """(frames, size, settings) -> size of the prepared frames; ValueError for a shape that is refused."""
    whole_layers: bool = False
    """Whether no frame is repeated to fill a layer: as many are taken as fill whole ones."""
    as_images: bool = False
    """Whether the tokens of a layer of frames are those of an image."""
    is_of_frame: bool = False
    """Whether the bounds on pixels apply to each frame, and not to all frames together."""
    samples: bool = True
    """Default of `do_sample_frames` in transformers."""


def _sampled_in_steps(clip: Clip, settings: Mapping[str, Any]) -> Ints:
    together, total = settings["temporal_patch_size"], clip.frames
    if clip.wanted_fps is None and settings["num_frames"] is not None:
        count = round(settings["num_frames"] / together) * together
    else:
        most = min(settings["max_frames"], total) // together * together
        wanted = total / (clip.fps or USUAL_FPS) * (clip.wanted_fps or settings["fps"])
        count = int(min(max(wanted, settings["min_frames"]), most, total)) // together * together
    if not 0 < count <= total:
        raise ValueError(f"{count} frames would be taken of its {total}")
    # With torch, because rounding in float32 decides which frames are taken.
    return torch.arange(0, total, total / count).int().numpy().astype(np.int64)


def _sampled_evenly(clip: Clip, settings: Mapping[str, Any]) -> Ints:
    total, count = clip.frames, settings["num_frames"]
    if clip.wanted_fps is not None or count is None:
        count = int(total / (clip.fps or USUAL_FPS) * (clip.wanted_fps or settings["fps"]))
        count = min(max(count, settings["min_frames"]), settings["max_frames"], total)
    return np.linspace(0, total - 1, count).round().astype(np.int64)


def _sampled_by_second(clip: Clip, settings: Mapping[str, Any]) -> Ints:
    total, fps, wanted = clip.frames, clip.fps or USUAL_FPS, clip.wanted_fps or settings["fps"]
    duration, longest = total / fps, settings["max_duration"]
    if duration <= longest:
        # Twice the rate of the file takes every frame already.
        wanted = min(wanted, 2 * fps)
        places = np.arange(max(int(duration * wanted), 1)) * fps / wanted
    elif (count := int(longest * wanted)) < total:
        places = np.linspace(0, duration, count) * fps
    else:
        places = np.arange(total)
    chosen = np.unique(np.minimum(np.ceil(places), total - 1).astype(np.int64))
    # An odd last frame is repeated here, so that the size of frames counts it.
    return np.append(chosen, chosen[-1:]) if len(chosen) % 2 else chosen


def _resized_by_frame(frames: int, size: tuple[int, int], settings: Mapping[str, Any]) -> tuple[int, int]:
    factor = settings["patch_size"] * settings["merge_size"]
    least, most = settings["size"]["shortest_edge"], settings["size"]["longest_edge"]
    if settings["cap_pixels_per_frame"]:
        together = int(settings["max_video_tokens"] * factor * factor * 0.9)
        most = max(min(most, together * settings["temporal_patch_size"] // frames), int(least * 1.05))
    found: tuple[int, int] = resized_image(*size, factor=factor, min_pixels=least, max_pixels=most)
    return found


def _resized_as_whole(frames: int, size: tuple[int, int], settings: Mapping[str, Any]) -> tuple[int, int]:
    factor = settings["patch_size"] * settings["merge_size"]
    least, most = settings["size"]["shortest_edge"], settings["size"]["longest_edge"]
    if settings["cap_pixels_per_frame"]:
        of_frame = min(settings["max_video_tokens"] * factor * factor, most // frames)
        most = max(of_frame, int(least * 1.05)) * frames
    found: tuple[int, int] = resized_video(
        frames, *size, temporal_factor=settings["temporal_patch_size"], factor=factor, min_pixels=least, max_pixels=most
    )
    return found


def _resized_with_time(frames: int, size: tuple[int, int], settings: Mapping[str, Any]) -> tuple[int, int]:
    found: tuple[int, int] = resized_evenly(
        frames,
        *size,
        temporal_factor=settings["temporal_patch_size"],
        factor=settings["patch_size"] * settings["merge_size"],
        min_pixels=settings["size"]["shortest_edge"],
        max_pixels=settings["size"]["longest_edge"],
    )
    return found


QWEN2 = VideoRules(
    defaults={
        **_OF_QWEN,
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
        "image_mean": OPENAI_CLIP_MEAN,
        "image_std": OPENAI_CLIP_STD,
        "patch_size": 14,
        "fps": USUAL_FPS,
        "max_video_tokens": 128_000,
        "min_pixels": None,
        "max_pixels": None,
    },
    sampled=_sampled_in_steps,
    resized=_resized_by_frame,
    is_of_frame=True,
    samples=False,
    whole_layers=True,
)
"""Frames in equal steps; the bounds on pixels apply to each frame."""
QWEN3 = VideoRules(
    defaults={
        **_OF_QWEN,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": 16,
        "fps": USUAL_FPS,
        "max_video_tokens": 768,
    },
    sampled=_sampled_evenly,
    resized=_resized_as_whole,
)
"""Frames spread evenly from the first to the last; the bounds on pixels apply to all frames together."""
GLM = VideoRules(
    defaults={
        **_SHARED,
        "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30_000},
        "image_mean": OPENAI_CLIP_MEAN,
        "image_std": OPENAI_CLIP_STD,
        "patch_size": 14,
        "fps": USUAL_FPS,
        "max_duration": 300,
    },
    sampled=_sampled_by_second,
    resized=_resized_with_time,
    as_images=True,
)
"""Frames at a rate, of long videos spread evenly; the bounds on pixels apply to all frames together."""
