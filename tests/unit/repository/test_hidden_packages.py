import os
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", [pytest.param("storage", marks=pytest.mark.long), "trials"])
def test_a_folder_that_hides_a_package_of_autotune_is_named(tmp_path: Path, name: str) -> None:
    """As with `PYTHONPATH=.` in a folder that has a package of this common name."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": f".{os.pathsep}{HOME}"}
    command = [sys.executable, "-P", "-c", "from autotune.cli import main"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    last = ended.stderr.splitlines()[-1]
    assert ended.returncode == 1
    assert f"needs its own package {name!r} in {HOME}, but Python finds {tmp_path / name}" in last
    assert "remove the folder that contains it from PYTHONPATH" in last
