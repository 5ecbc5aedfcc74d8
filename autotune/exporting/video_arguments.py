"""Settings of videos of a model folder as arguments of other trainers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trials.model.inputs.video_limits import VideoLimits

_FRAMES, _PIXELS = ("fps", "min_frames", "max_frames"), ("min_pixels", "max_pixels")


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoArguments:
    """What a trainer has for the settings of videos."""

    names: Mapping[str, str]
    """Its arguments by field of `VideoLimits`."""
    bounds_all: bool = False
    """Whether bounds on the pixels of all frames together hold there."""

    def settings(self, limits: VideoLimits | None) -> dict[str, int | float]:
        """Return its arguments for the settings of a model folder; none for data without videos."""
        fields = (*_FRAMES, *(_PIXELS if limits and (limits.is_of_frame or self.bounds_all) else ()))
        found = {self.names[field]: getattr(limits, field, None) for field in fields if field in self.names}
        return {name: value for name, value in found.items() if value is not None}

    def left_out(self, limits: VideoLimits | None, filmed: str) -> Iterator[str]:
        """Yield what it has no argument for; `filmed` says how many samples have videos."""
        if limits is None:
            return
        lost = [field for field in _FRAMES if field not in self.names and getattr(limits, field) is not None]
        if lost:
            texts = ", ".join(f"{field}: {getattr(limits, field):g}" for field in lost)
            yield f"{texts} ({limits.file}); {filmed} have videos, whose frames may be more or fewer there"
        if limits.max_pixels is not None and not (limits.is_of_frame or self.bounds_all):
            yield (
                f"size ({limits.file}), which bounds the pixels of all frames of a video together; there each frame is "
                f"bounded, so that {filmed} may have far more or fewer tokens: those with videos"
            )
        yield "which frames of a video are shown: the trainer spreads them by a rule of its own"


def resampled(limits: VideoLimits | None, family: str) -> Iterator[str]:
    """Yield that transformers would choose frames out of those of a trainer, for which it lacks the rate of the file.

    The trainers pass it for later models alone. Source: `Qwen2VLVideoProcessor.sample_frames`.
    """
    if limits and limits.samples and family in ("qwen2_vl", "qwen2_5_vl"):
        yield (
            f"WARNING: do_sample_frames is true in {limits.file}, with which transformers chooses frames a second time "
            "there and stops at the first video, whose rate it does not get; set it to false, which changes nothing in "
            "autotune"
        )
