"""The example's model and a part of its data, made once for all integration tests."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.users import JobFile
from trials.run.pool import WarmPool
from trials.run.ranks import local_ranks

GENERATOR = Path(__file__).parents[2] / "examples" / "tiny-internvl" / "generate.py"


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `model/` and `data/` of 48 samples; read it, do not change it."""
    folder = tmp_path_factory.mktemp("example")
    subprocess.run([sys.executable, GENERATOR, "--folder", folder, "--samples", "48"], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPool]:
    """Two ranks that all tests share; the folder's space is part of the test."""
    with WarmPool(local_ranks(2, "cpu"), tmp_path_factory.mktemp("a pool")) as pool:
        yield pool


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home of the test's own; its data folder is made by whatever keeps something."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home" / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    monkeypatch.delenv("AUTOTUNE_DB_URL", raising=False)
    return tmp_path / "home"


@pytest.fixture
def job(example: Path, tmp_path: Path) -> JobFile:
    return JobFile(example, tmp_path)


@pytest.fixture
def model(example: Path, tmp_path: Path) -> Path:
    """A copy of the example's model."""
    return Path(shutil.copytree(example / "model", tmp_path / "model"))


@pytest.fixture
def heard_interrupts() -> Iterator[None]:
    """Ctrl-C reaches what is started, also where a shell runs the tests in the background and so ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
