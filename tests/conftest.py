"""The databases that tests run on, SQLite files and a real PostgreSQL, and the example's model and data."""

import gc
import importlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

from tests.programs import postgres

# Several tests and ranks run at the same time, and threads of OpenMP that wait for each other take a whole core each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Else the file system takes a quarter of the CPU time of tests on databases.
MEMORY = "/dev/shm"
if "TMPDIR" not in os.environ and os.access(MEMORY, os.W_OK):
    has_room = shutil.disk_usage(MEMORY).free > 4 << 30
    if has_room and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC:
        os.environ["TMPDIR"] = tempfile.tempdir = MEMORY

# No time decides a test: other tests and ranks run at the same time.
settings.register_profile("whole", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=100)
settings.register_profile("short", settings.get_profile("whole"), max_examples=20)
settings.load_profile("whole")

GENERATOR = Path(__file__).parents[1] / "examples" / "tiny-internvl" / "generate.py"

# Else the garbage collector searches all objects of torch and transformers again and again: a seventh of the CPU time.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    """Let runs without long tests try fewer examples."""
    if config.option.markexpr == "not long":
        settings.load_profile("short")


def pytest_collection_finish() -> None:
    """Let the garbage collector work on what tests make, without what their imports made."""
    gc.freeze()
    gc.set_threshold(10_000)  # one twentieth of the CPU time of tests that make many objects is spent on collections
    gc.enable()


LEFT_OUT = pytest.StashKey[int]()
"""Number of long tests that the run leaves out."""


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count the long tests among them."""
    for item in items:
        item.config.stash[LEFT_OUT] = item.config.stash.get(LEFT_OUT, 0) + ("long" in item.keywords)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the count from a worker of pytest-xdist, which does not report deselected tests."""
    output = getattr(session.config, "workeroutput", {})
    output["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the count from a worker; every worker collects all tests. One that crashed sends none."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say at the end how many long tests were left out."""
    if left_out := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"{left_out} long tests were left to `make test-long`")


@pytest.fixture(scope="session", autouse=True)
def _data_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the user's own database and the locks of devices, which other test processes hold, out of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_DATA_HOME", "XDG_STATE_HOME"):
            patch.setenv(name, str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """URL of a database from which others can be created."""
    with postgres.server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a database that does not exist yet (SQLite) or is empty (PostgreSQL)."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'store.db'}"
        return
    with postgres.database(request.getfixturevalue("postgres_server")) as url:
        yield url


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """Return a folder of this name that a function has filled, in one of the workers of pytest-xdist for all."""
    own = tmp_path_factory.getbasetemp()
    common = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def made(name: str, make: Callable[[Path], object]) -> Path:
        folder = common / name
        with FileLock(common / f"{name}.lock"):
            if not folder.exists():
                unfinished = tmp_path_factory.mktemp(name)
                make(unfinished)
                unfinished.rename(folder)
        return folder

    return made


@pytest.fixture(scope="session")
def wide(made_once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """The example as its generator makes it, with 48 samples, for what depends on the width of its layers."""

    def generate(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(GENERATOR.parent))
            importlib.import_module(GENERATOR.stem).generate(folder, 48)

    return made_once("wide", generate)


@pytest.fixture(scope="session")
def example(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `model/`, of narrow layers, and `data/` of 48 samples; read it, do not change it."""
    from tests.values.training import variant_of  # noqa: PLC0415  # imports torch, which most tests do without

    def change(config: dict[str, Any]) -> None:
        config["vision_config"] |= {"hidden_size": 32, "intermediate_size": 64}
        config["text_config"] |= {"hidden_size": 48, "intermediate_size": 96}

    return variant_of(wide, tmp_path_factory.mktemp("example"), change)


@pytest.fixture(scope="session")
def study_url(
    made_once: Callable[[str, Callable[[Path], object]], Path], tmp_path_factory: pytest.TempPathFactory
) -> str:
    """URL of a database with one finished study; read it, do not change it."""

    def search(folder: Path) -> None:
        from storage.store import open_store  # noqa: PLC0415
        from tests.values.report_studies import searched  # noqa: PLC0415

        with open_store(f"sqlite:///{folder}/study.db") as store:
            searched(folder, store)

    # A copy for each worker, since a database that is open may be more than its file.
    return f"sqlite:///{shutil.copy(made_once('study', search) / 'study.db', tmp_path_factory.mktemp('study'))}"


@pytest.fixture(scope="session")
def shallow(example: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with 4 vision and 2 language layers, for what does not depend on their number."""
    return _with_few_layers(example, tmp_path_factory.mktemp("shallow"))


@pytest.fixture(scope="session")
def wide_shallow(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, for what depends on the width of the layers."""
    return _with_few_layers(wide, tmp_path_factory.mktemp("wide-shallow"))


def _with_few_layers(example: Path, folder: Path) -> Path:
    from tests.values.training import variant_of  # noqa: PLC0415  # imports torch, which most tests do without

    def change(config: dict[str, Any]) -> None:
        config["vision_config"]["num_hidden_layers"] = 4
        config["text_config"]["num_hidden_layers"] = 2
        config["text_config"]["layer_types"] = config["text_config"]["layer_types"][:2]

    return variant_of(example, folder, change)
