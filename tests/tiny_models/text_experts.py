"""Qwen3 with experts in all layers but one."""

from pathlib import Path

from tests.tiny_models.text import make_kind


def make(folder: Path) -> None:
    make_kind(folder, "qwen3_moe", mlp_only_layers=[1])
