"""The example's model, a part of its data and its profile, made once for all integration tests."""

import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.machine.devices import locked
from autotune.model_shape import model_shape
from autotune.search.execution import profiling
from autotune.search.execution.profiling import layer_costs
from autotune.workload import Prepared
from storage.store import Store, open_store
from tests.programs.users import JobFile
from tests.values.training import job_of, prepared_of
from trials import wire
from trials.costs.layer_costs import LayerCosts
from trials.launchers.local import LocalLauncher
from trials.plan import Plan
from trials.run.pool import WarmPool


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPool]:
    """Two ranks that all tests share; the space in the folder's name is part of the test."""
    with WarmPool(LocalLauncher(tmp_path_factory.mktemp("a pool"), 2, "cpu")) as pool:
        yield pool


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPool]:
    """Four ranks, which start with the first request."""
    with WarmPool(LocalLauncher(tmp_path_factory.mktemp("four"), 4, "cpu")) as pool:
        yield pool


@pytest.fixture(scope="session")
def prepared(example: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """The job on the example, for two ranks."""
    return prepared_of(example, tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="session")
def profile_store(tmp_path_factory: pytest.TempPathFactory, prepared: Prepared) -> Iterator[Store]:
    """Knows the job's workload, and its profile once there are `costs`."""
    with open_store(f"sqlite:///{tmp_path_factory.mktemp('store')}/autotune.db") as store:
        store.add_workload(prepared.workload)
        yield store


@pytest.fixture(scope="session")
def costs(
    prepared: Prepared,
    profile_store: Store,
    request: pytest.FixtureRequest,
    made_once: Callable[[str, Callable[[Path], object]], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> LayerCosts:
    """The profile of the example on two ranks."""

    def measure(folder: Path) -> None:
        pool = request.getfixturevalue("pool")
        with pytest.MonkeyPatch.context() as patch:
            # Times that are less certain serve, and bytes are the same.
            patch.setattr(profiling, "_REPEATS", 1)
            patch.setattr(profiling, "_CURVE_SPREAD", -1.0)
            found = layer_costs(prepared, profile_store, pool, tmp_path_factory.mktemp("logs"))
        # Other tests may disturb the profile; tests that use it expect no warning of that.
        (folder / "costs.json").write_text(wire.encode(replace(found, disturbance=None)))

    return wire.decode(LayerCosts, (made_once("profile", measure) / "costs.json").read_text())


@pytest.fixture
def brief_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles time each layer once, and exchanges for a moment: enough where their bytes are checked, not times."""
    monkeypatch.setattr(profiling, "_REPEATS", 1)
    monkeypatch.setattr(profiling, "_CURVE_SPREAD", -1.0)
    monkeypatch.setattr(profiling, "_EXCHANGE_SECONDS", 0.3)


@pytest.fixture
def plan_file(tmp_path: Path) -> Callable[[Plan], Path]:
    """Write a plan to a file."""

    def write(plan: Plan) -> Path:
        path = tmp_path / "plan.json"
        path.write_text(wire.encode(plan))
        return path

    return write


@pytest.fixture(scope="session")
def give_profile(prepared: Prepared, costs: LayerCosts) -> Callable[..., None]:
    """Store the profile in a user's database, so that tuning begins with its first trial.

    It holds for the example and its variants, of any sizes: what was measured is one layer of each kind.
    """

    def give(url: str, devices: int = 2, example: Path | None = None, groups: int = 1) -> None:
        work, cores = prepared.workload, max(1, prepared.workload.hardware.cpu_cores // groups)
        model = work.model if example is None else model_shape(job_of(example, Path()).model)
        work = replace(work, hardware=replace(work.hardware, devices=devices, cpu_cores=cores), model=model)
        with open_store(url) as store:
            store.add_workload(work)
            document = wire.encode(replace(costs, sizes=None))
            store.save_layer_profile(work.hardware.fingerprint, work.model.fingerprint, work.software, document)

    return give


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder for the test; the data folder in it is created on first use."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home" / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home" / "state"))
    monkeypatch.delenv("AUTOTUNE_DB_URL", raising=False)
    return tmp_path / "home"


@pytest.fixture
def devices_in_use(home: Path) -> Iterator[None]:
    """Use the devices, so that `doctor` tries no layers on them: for that it starts a process that imports torch."""
    with locked(("cpu",)):
        yield


@pytest.fixture
def job(example: Path, tmp_path: Path) -> JobFile:
    return JobFile(example, tmp_path)


@pytest.fixture
def model(example: Path, tmp_path: Path) -> Path:
    """A copy of the example's model."""
    return Path(shutil.copytree(example / "model", tmp_path / "model"))


@pytest.fixture
def heard_interrupts() -> Iterator[None]:
    """Let Ctrl-C and hang-ups reach child processes, even if a background shell or `nohup` ignores them."""
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGHUP, hangup)
