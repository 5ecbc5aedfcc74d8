"""What shells and editors get: completion, the schema of the job file, and options before the command."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from autotune.cli import main
from autotune.job_file import load_job
from storage.store import open_store

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny-internvl" / "job.yaml"
MINIMAL = {"model": {"path": "model"}, "data": {"sources": [{"path": "train.jsonl"}]}}


def output(*arguments: str) -> str:
    answer = CliRunner().invoke(main, arguments)
    assert answer.exit_code == 0, answer.output
    return answer.stdout


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(output("schema"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_schema_takes_the_example(validator: jsonschema.Draft202012Validator) -> None:
    validator.validate(yaml.safe_load(EXAMPLE.read_text()))
    load_job(EXAMPLE)


@pytest.mark.parametrize(
    "section",
    [
        {"hardware": {"memory_limit": "400MiB", "devices": 2}},
        {"search": {"time_limit": "10min", "space": {"recompute": [[1, 2], [0, 0]], "split": [3, 4]}}},
        {"training": {"warmup": 0.1, "schedule": "cosine", "learning_rates": {"vision": 1e-6}}},
    ],
)
def test_the_schema_takes_what_the_job_file_takes(
    section: dict[str, object], validator: jsonschema.Draft202012Validator, tmp_path: Path
) -> None:
    validator.validate({**MINIMAL, **section})
    (tmp_path / "job.yaml").write_text(json.dumps({**MINIMAL, **section}))
    load_job(tmp_path / "job.yaml")


@pytest.mark.parametrize(
    "document",
    [
        {"model": {"path": "model"}},
        {**MINIMAL, "trainig": {}},
        {**MINIMAL, "training": {"epochs": "two"}},
        {**MINIMAL, "training": {"schedule": "step"}},
        {**MINIMAL, "search": {"space": {"recompute": "some"}}},
    ],
)
def test_the_schema_refuses_what_the_job_file_refuses(
    document: dict[str, object], validator: jsonschema.Draft202012Validator
) -> None:
    assert not validator.is_valid(document)


def completed(*lines: str) -> list[str]:
    """What bash offers for the last word of each of these lines, after its user has turned completion on."""
    script = 'eval "$(autotune completion bash)"\n' + "".join(
        f"COMPREPLY=(); COMP_WORDS=({line}); COMP_CWORD={len(line.split()) - 1}\n"
        '_autotune_completion autotune 2>/dev/null; printf "%s\\n" "${COMPREPLY[*]}"\n'
        for line in lines
    )
    bash = shutil.which("bash")
    assert bash, "every Linux system has bash"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run([bash, "-c", script], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.splitlines()


def test_bash_completes_commands_and_options() -> None:
    assert completed("autotune stu", "autotune launch --dr") == ["studies", "--dry-run"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_of_their_own(shell: str) -> None:
    assert f"{shell}_complete" in output("completion", shell)


def test_common_options_may_stand_before_the_command(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'known.db'}"
    open_store(url).close()
    behind = output("plans", "--db", url, "--json")
    assert json.loads(output("--json", "--db", url, "plans")) == json.loads(behind)
    assert json.loads(output("--db", "sqlite:////nowhere/at/all.db", "plans", "--db", url, "--json")) == json.loads(
        behind
    )
