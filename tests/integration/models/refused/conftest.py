"""Tiny models of every family to be spoiled."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trials import plugins

TINY: plugins.Plugins[Any] = plugins.Plugins("tests.tiny_models")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's tiny model, made once; read it, do not change it."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            plugins.load(TINY, name).make(folders[name])
        return folders[name]

    return folder


@pytest.fixture
def tiny(made: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Copy a family's tiny model, for a test that changes it."""
    return lambda name: Path(shutil.copytree(made(name), tmp_path / name))
