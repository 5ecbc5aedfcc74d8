import ast
import subprocess
import sys
from collections import Counter
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("autotune", "storage", "trials")


@pytest.fixture(scope="module")
def installed() -> Distribution:
    return distribution("vlm-autotune")


def imported(*modules: str, cwd: Path) -> dict[str, str]:
    """Every module that a fresh interpreter holds after importing `modules`, with its file."""
    script = (
        f"import sys, {', '.join(modules)}\n"
        "for name, module in sys.modules.items(): print(name, getattr(module, '__file__', None), sep='\\t')"
    )
    ran = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True, cwd=cwd)
    return dict(line.split("\t") for line in ran.stdout.splitlines())


def test_each_top_level_name_is_ours_from_any_folder(tmp_path: Path) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    files = imported(*PACKAGES, cwd=tmp_path)
    assert [Path(files[package]) for package in PACKAGES] == [ROOT / package / "__init__.py" for package in PACKAGES]


def test_ranks_start_without_the_agents_packages(tmp_path: Path) -> None:
    modules = imported("trials.job", "trials.plan", "trials.outcome", "trials.workload", cwd=tmp_path)
    assert not {"sqlalchemy", "optuna", "click", "alembic", "torch", "storage", "autotune"} & modules.keys()


def test_the_agent_reads_a_job_and_the_hardware_without_torch(tmp_path: Path) -> None:
    modules = imported("autotune.job_file", "autotune.machine.hardware", cwd=tmp_path)
    assert not {"torch", "deepspeed", "transformers", "optuna", "sqlalchemy"} & modules.keys()


def test_the_command_line_answers_without_heavy_imports(tmp_path: Path) -> None:
    modules = imported("autotune.cli", cwd=tmp_path)
    assert not {"torch", "deepspeed", "transformers", "optuna", "sqlalchemy", "numpy", "pydantic"} & modules.keys()


def test_the_license_is_declared_and_shipped(installed: Distribution) -> None:
    assert installed.metadata["License-Expression"] == "MIT"
    assert (ROOT / "LICENSE").read_text().startswith("MIT License")


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_may_use_our_types(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


def test_the_command_is_installed(installed: Distribution) -> None:
    assert [(entry.name, entry.value) for entry in installed.entry_points] == [("autotune", "autotune.cli:main")]


@pytest.mark.parametrize("folder", [*PACKAGES, "tests", "benchmarks"])
def test_no_folder_holds_more_than_20_modules_and_no_module_more_than_400_lines(folder: str) -> None:
    modules = [module for module in (ROOT / folder).rglob("*.py") if module.stat().st_size]
    assert not [parent for parent, count in Counter(module.parent for module in modules).items() if count > 20]
    assert not [module for module in modules if len(module.read_text().splitlines()) > 400]


def test_no_two_classes_have_the_same_name() -> None:
    modules = [ast.parse(path.read_text()) for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    names = Counter(node.name for module in modules for node in ast.walk(module) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_or_folder_has_the_name_of_a_standard_module(package: str) -> None:
    names = {path.stem for path in (ROOT / package).rglob("*.py")}
    names |= {path.parent.name for path in (ROOT / package).rglob("*.py")}
    assert sorted(names & sys.stdlib_module_names) == []
