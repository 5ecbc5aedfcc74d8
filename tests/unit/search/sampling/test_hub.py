"""Samplers of OptunaHub, loaded by its own package from registries in folders."""

import sys
from pathlib import Path

import optuna
import pytest

from autotune.errors import JobError
from autotune.job_file import job_of_values
from autotune.search.roles import Role
from autotune.search.sampling.hub import hub_sampler
from storage.store import open_store
from tests.machines.search_bench import PREDICTOR, Bench
from tests.machines.simulated import SimulatedLauncher
from tests.unit.search.sampling.test_samplers import SOLVER, SPACE, suggested
from trials.job import Job

GUESS = """
from random import Random

import optunahub


class Guess(optunahub.samplers.SimpleBaseSampler):
    def __init__(self, search_space=None, seed=None):
        super().__init__(search_space, seed)
        self.random = Random(seed)

    def sample_relative(self, study, trial, search_space):
        return {
            name: self.random.choice(getattr(values, "choices", None) or range(values.low, values.high + 1))
            for name, values in search_space.items()
        }
"""
TWO = """
from optuna.samplers import RandomSampler, TPESampler

__all__ = ["RandomSampler", "TPESampler"]
"""
PACKAGES = {
    "guess": "from .guess import Guess\n\n__all__ = ['Guess']\n",
    "all_named": TWO,
    "unnamed": "from optuna.samplers import RandomSampler\n\n\nclass Own(RandomSampler):\n    pass\n",
    "passing_on": "from optuna.samplers import TPESampler\n\n\nclass Own(TPESampler):\n"
    "    def __init__(self, **arguments):\n        super().__init__(**arguments)\n",
    "seedless": "from optuna.samplers import RandomSampler\n\n\nclass Own(RandomSampler):\n"
    "    def __init__(self):\n        super().__init__()\n",
    "empty": "from optuna.samplers import RandomSampler\n",
    "demanding": "from optuna.samplers import RandomSampler\n\n\nclass Own(RandomSampler):\n"
    "    def __init__(self, space):\n        super().__init__()\n",
    "needy": "import no_such_library\n",
    "failing": "from optuna.samplers import RandomSampler\n\n\nclass Own(RandomSampler):\n"
    "    def sample_independent(self, study, trial, name, values):\n"
    "        raise NotImplementedError('no categories\\nat all')\n",
}


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with `samplers/`; another one, in which OptunaHub keeps what it downloads, is empty."""
    monkeypatch.setenv("OPTUNAHUB_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # where nobody answers
    return filled(tmp_path / "registry")


def filled(registry: Path) -> Path:
    for name, text in PACKAGES.items():
        folder = registry / "samplers" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(text)
    (registry / "samplers" / "guess" / "guess.py").write_text(GUESS)
    return registry


def test_a_search_tries_the_plans_nearest_to_what_a_sampler_of_a_folder_suggests(registry: Path) -> None:
    with open_store(f"sqlite:///{registry / 'store.db'}") as store:
        bench = Bench(registry, store)
        study = bench.study()
        bench.search(study, SimulatedLauncher(PREDICTOR), trials=9, sampler=f"hub:guess@{registry}")
        sampled = [trial for trial in bench.stored(study) if trial.role == Role.SAMPLED]
        found = optuna.load_study(study_name=study.name, storage=store.optuna_url).get_trials()
    assert len(sampled) >= 3
    assert {trial.id for trial in sampled} <= {trial.user_attrs["trial_id"] for trial in found if trial.params}


@pytest.mark.parametrize("package", ["guess", pytest.param("unnamed", marks=pytest.mark.long), "passing_on"])
def test_the_seed_of_the_study_reaches_a_sampler_that_takes_one(registry: Path, package: str) -> None:
    name = f"hub:{package}@{registry}"
    points = suggested(name, 3, seed=1)
    assert points == suggested(name, 3, seed=1) != suggested(name, 3, seed=2)
    assert all(SOLVER.admits(SPACE.plan(point)) and SPACE.point(SPACE.plan(point)) == point for point in points)


def test_a_class_of_several_is_named_behind_a_second_colon(registry: Path) -> None:
    assert hub_sampler(f"hub:all_named:TPESampler@{registry}").kind is optuna.samplers.TPESampler
    assert hub_sampler(f"hub:seedless@{registry}").kind.__name__ == "Own"


def test_a_package_that_was_downloaded_before_needs_no_network(registry: Path) -> None:
    filled(registry.parent / "cache" / "github.com" / "optuna" / "optunahub-registry" / "main" / "package")
    assert hub_sampler("hub:guess").kind.__name__ == "Guess"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hub:", "names no package of OptunaHub; write hub:PACKAGE, such as hub:auto_sampler, or hub:PACKAGE@FOLDER"),
        ("hub:../guess@FOLDER", "names no package of OptunaHub"),
        ("hub:nowhere@FOLDER", r"cannot be loaded \(FileNotFoundError: .*; check that .*samplers/nowhere/__init__"),
        ("hub:needy@FOLDER", r"\(ModuleNotFoundError: No module named 'no_such_library'\); check .* is installed"),
        ("hub:empty@FOLDER", "stands for 0 samplers of its package, which has none; name another package"),
        (
            "hub:all_named@FOLDER",
            "stands for 2 samplers of .* RandomSampler, TPESampler; name one as hub:PACKAGE:CLASS",
        ),
        ("hub:guess:Other@FOLDER", "stands for 0 samplers of its package, which has Guess; name one as"),
        ("hub:demanding@FOLDER", r"cannot be made \(TypeError: .*'space'\); name a sampler that needs no arguments"),
        ("hub:guess", r"cannot be loaded \(.*127\.0\.0\.1.*; check its name on https://hub\.optuna\.org, that GitHub"),
    ],
)
def test_what_is_no_sampler_is_refused_with_the_reason(registry: Path, name: str, message: str) -> None:
    with pytest.raises(JobError, match=f"^search.sampler: .*{message}"):
        hub_sampler(name.replace("FOLDER", str(registry)))


def test_without_the_package_the_command_that_installs_it_is_named(
    registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optunahub", None)
    with pytest.raises(JobError, match=r"^search\.sampler: hub:guess needs .* it with `pip install optunahub`,"):
        hub_sampler("hub:guess")


def test_a_sampler_that_fails_ends_the_search_with_its_reason_and_keeps_the_trials(registry: Path) -> None:
    with open_store(f"sqlite:///{registry / 'store.db'}") as store:
        bench = Bench(registry, store)
        study = bench.study()
        with pytest.raises(JobError, match=r"hub:failing@.* failed \(NotImplementedError: no categories at all\)"):
            bench.search(study, SimulatedLauncher(PREDICTOR), sampler=f"hub:failing@{registry}")
        assert bench.stored(study)


def test_the_folder_of_a_registry_is_relative_to_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = {"path": "train.jsonl"}

    def job_of(sampler: str) -> Job:
        return job_of_values({"model": {"path": "m"}, "data": {"sources": [source]}, "search": {"sampler": sampler}})

    assert job_of("hub:guess@mine").search.sampler == f"hub:guess@{tmp_path}/mine"
    assert job_of("hub:guess").search.sampler == "hub:guess"
