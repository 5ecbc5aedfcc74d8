"""The databases that tests run on, SQLite files and a real PostgreSQL, and the example's model and data."""

import gc
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import postgres

# Several tests and ranks run at the same time, and threads of OpenMP that wait for each other take a whole core each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No time decides a test: other tests and ranks run at the same time.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

GENERATOR = Path(__file__).parents[1] / "examples" / "tiny-internvl" / "generate.py"

# Else the garbage collector searches all objects of torch and transformers again and again: a seventh of the CPU time.
gc.disable()


def pytest_collection_finish() -> None:
    """Let the garbage collector work on what tests make, without what their imports made."""
    gc.freeze()
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
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example as its generator makes it, with 48 samples, for what depends on the width of its layers."""
    folder = tmp_path_factory.mktemp("wide")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(GENERATOR.parent))
        importlib.import_module(GENERATOR.stem).generate(folder, 48)
    return folder


@pytest.fixture(scope="session")
def example(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `model/`, of narrow layers, and `data/` of 48 samples; read it, do not change it."""
    from tests.training_values import variant_of  # noqa: PLC0415  # imports torch, which most tests do without

    def change(config: dict[str, Any]) -> None:
        config["vision_config"] |= {"hidden_size": 32, "intermediate_size": 64}
        config["text_config"] |= {"hidden_size": 48, "intermediate_size": 96}

    return variant_of(wide, tmp_path_factory.mktemp("example"), change)


@pytest.fixture(scope="session")
def shallow(example: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with 4 vision and 2 language layers, for what does not depend on their number."""
    return _with_few_layers(example, tmp_path_factory.mktemp("shallow"))


@pytest.fixture(scope="session")
def wide_shallow(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, for what depends on the width of the layers."""
    return _with_few_layers(wide, tmp_path_factory.mktemp("wide-shallow"))


def _with_few_layers(example: Path, folder: Path) -> Path:
    from tests.training_values import variant_of  # noqa: PLC0415  # imports torch, which most tests do without

    def change(config: dict[str, Any]) -> None:
        config["vision_config"]["num_hidden_layers"] = 4
        config["text_config"]["num_hidden_layers"] = 2
        config["text_config"]["layer_types"] = config["text_config"]["layer_types"][:2]

    return variant_of(example, folder, change)
