"""InternVL, as the example makes it."""

import importlib
from pathlib import Path

import pytest

_GENERATOR = Path(__file__).parents[2] / "examples" / "tiny-internvl" / "generate.py"


def make(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(_GENERATOR.parent))
        importlib.import_module(_GENERATOR.stem).make_model(folder, ["A circle and a square."])
