"""Settings of videos as arguments of trainers."""

from dataclasses import replace

import pytest

from autotune.exporting.video_arguments import VideoArguments, resampled
from trials.model.inputs.video_limits import VideoLimits

LIMITS = VideoLimits(
    fps=2,
    min_frames=4,
    max_frames=12,
    min_pixels=3136,
    max_pixels=37632,
    is_of_frame=True,
    samples=True,
    file="video_preprocessor_config.json",
    read=(),
    unknown=(),
)
OF_ALL = replace(LIMITS, is_of_frame=False)
NAMES = {name: name.upper() for name in ("fps", "min_frames", "max_frames", "min_pixels", "max_pixels")}


def test_bounds_on_all_frames_together_are_no_bounds_on_each() -> None:
    each, together = (VideoArguments(names=NAMES, bounds_all=bounds_all) for bounds_all in (False, True))
    assert each.settings(LIMITS) == together.settings(OF_ALL) == {
        "FPS": 2, "MIN_FRAMES": 4, "MAX_FRAMES": 12, "MIN_PIXELS": 3136, "MAX_PIXELS": 37632,
    }  # fmt: skip
    assert each.settings(OF_ALL) == {"FPS": 2, "MIN_FRAMES": 4, "MAX_FRAMES": 12}
    assert any(
        "4 of 9 samples may have far more or fewer tokens" in it for it in each.left_out(OF_ALL, "4 of 9 samples")
    )
    assert not any("size" in it for it in (*each.left_out(LIMITS, ""), *together.left_out(OF_ALL, "")))


def test_data_without_videos_have_neither_arguments_nor_losses() -> None:
    arguments = VideoArguments(names=NAMES)
    assert (arguments.settings(None), [*arguments.left_out(None, "")]) == ({}, [])


@pytest.mark.parametrize(("family", "stops"), [("qwen2_5_vl", True), ("qwen3_vl", False)])
def test_frames_that_would_be_chosen_twice_are_named(family: str, stops: bool) -> None:
    assert bool([*resampled(LIMITS, family)]) == stops
    assert not [*resampled(replace(LIMITS, samples=False), family)]


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (LIMITS, "2 fps, 4 to 12 frames, 3,136 to 37,632 pixels a frame"),
        (OF_ALL, "2 fps, 4 to 12 frames, 3,136 to 37,632 pixels in all frames together"),
        (replace(LIMITS, fps=None, min_frames=16, max_frames=16, max_pixels=None), "16 frames"),
        (replace(LIMITS, fps=0.5, min_frames=None, max_pixels=None), "0.5 fps, at most 12 frames"),
    ],
)
def test_what_decides_on_videos_is_one_line(limits: VideoLimits, text: str) -> None:
    assert str(limits) == f"{text}, from video_preprocessor_config.json"
