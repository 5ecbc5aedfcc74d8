"""Measurers for tests that are about chunks, caches and processes: they load no model. Processes import this file."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import parent_process
from typing import Any

from trials.data.records.sample import Clip, Lengths, Measured, Sample
from trials.errors import DataError, ModelError


@dataclass(frozen=True, slots=True)
class Words:
    """Counts words, and pixels of images."""

    digest: str = "words"
    max_tokens: int | None = None
    takes_images: bool = True
    no_videos: DataError | ModelError | None = None

    @property
    def video_settings(self) -> Mapping[str, Any]:
        return {}

    def measure(
        self, sample: Sample, image_sizes: tuple[tuple[int, int], ...], clips: tuple[Clip, ...] = ()
    ) -> Measured:
        tokens = sum(len(turn.text.split()) for turn in sample.turns)
        targets = sum(len(turn.text.split()) for turn in sample.turns if turn.role == "assistant")
        assert not clips
        units = sum(height * width for height, width in image_sizes)
        return Measured(lengths=Lengths(vision_units=units, text_tokens=tokens, target_tokens=targets))


class Slow(Words):
    """Takes long enough to be interrupted."""

    def measure(
        self, sample: Sample, image_sizes: tuple[tuple[int, int], ...], clips: tuple[Clip, ...] = ()
    ) -> Measured:
        if parent_process() is not None:
            time.sleep(0.2)
        return Words.measure(self, sample, image_sizes, clips)


class Stuck(Words):
    """Never gives an answer outside the first process."""

    def measure(
        self, sample: Sample, image_sizes: tuple[tuple[int, int], ...], clips: tuple[Clip, ...] = ()
    ) -> Measured:
        if parent_process() is not None:
            time.sleep(600)
        return Words.measure(self, sample, image_sizes, clips)


class Dying(Words):
    """Ends every process but the first, as the kernel does when memory is short."""

    def measure(
        self, sample: Sample, image_sizes: tuple[tuple[int, int], ...], clips: tuple[Clip, ...] = ()
    ) -> Measured:
        if parent_process() is not None:
            os._exit(1)
        return Words.measure(self, sample, image_sizes, clips)


class Unloadable(Words):
    """Cannot be made in another process."""

    def __reduce__(self) -> tuple[Callable[[], Words], tuple[()]]:
        return refuse, ()


def refuse() -> Words:
    raise ModelError("the model is gone")
