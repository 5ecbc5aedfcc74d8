"""The example's model and a part of its data, made once for all integration tests."""

import subprocess
import sys
from pathlib import Path

import pytest

GENERATOR = Path(__file__).parents[2] / "examples" / "tiny-internvl" / "generate.py"


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `model/` and `data/` of 80 samples; read it, do not change it."""
    folder = tmp_path_factory.mktemp("example")
    subprocess.run([sys.executable, GENERATOR, "--folder", folder, "--samples", "80"], check=True, capture_output=True)
    return folder
