"""Gemma 2: caps of scores and logits, and windows in every other layer."""

from pathlib import Path

from tests.tiny_models.text import make_kind


def make(folder: Path) -> None:
    make_kind(folder, "gemma2")
