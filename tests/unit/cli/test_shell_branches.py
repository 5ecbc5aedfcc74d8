"""What `init --from` makes of tests, loops and several trainings in a launch script."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.cli import main
from autotune.draft.shell_script import NoValue, commands_of
from autotune.job_file import load_job
from trials.job import Job

TRAINER = (
    "torchrun --nproc_per_node 2 train.py --model_name_or_path MODEL --data_path train.jsonl "
    "--per_device_train_batch_size 4 --bf16 True --learning_rate "
)
BY_SIZE = 'if [ "$M" = 2b ]; then X=1; elif [ "$M" = 8b ]; then X=2; else X=3; fi\na $X'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's folder with a model and data; it is the current one."""
    (tmp_path / "MODEL").mkdir()
    (tmp_path / "train.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)


def converted(script: str) -> tuple[Job, str]:
    """The job that `init` writes, and its notes."""
    Path("run.sh").write_text(script)
    answer = CliRunner().invoke(main, ["init", "--json", "--from", "run.sh"])
    assert answer.exit_code == 0, answer.output
    return load_job(Path("job.yaml")), "\n".join(json.loads(answer.stdout)["notes"])


@pytest.mark.parametrize(
    ("script", "word"),
    [
        (f"M=2b\n{BY_SIZE}", "1"),
        (f"M=${{1:-8b}}\n{BY_SIZE}", "2"),
        (f"M=1b\n{BY_SIZE}", "3"),
        (f"M=$(x)\n{BY_SIZE}", None),
        ("G=8\nif [ $G -ge 8 ]; then X=1; else X=2; fi\na $X", "1"),
        ("G=8\nif [[ $G -lt 8 ]]; then X=1; else X=2; fi\na $X", "2"),
        ("if ! [ -f x ]; then X=1; else X=2; fi\na $X", None),
        ("if [ -f x ]; then X=1; else X=1; fi\na $X", "1"),
        ("X=1\nif [ -f x ]; then X=2; fi\na $X", None),
        ("X=1\nif [ -f x ]; then Y=2; fi\na $X", "1"),
        ("if [ -f x ]; then X=1\na $X; fi", "1"),
        ('M=Qwen2.5-VL\nif [[ "$M" == *Qwen2.5* ]]; then X=1; else X=2; fi\na $X', None),
        ('M=a\nif [[ "$M" =~ ^(a|b)$ ]]; then X=1; else X=2; fi\na $X', None),
        ("A=1\nB=2\nif [ $A = 1 ] && [ $B = 1 ]; then X=1; else X=2; fi\na $X", "2"),
        ("A=1\nB=2\nif [[ $A == 1 && $B == 1 ]]; then X=1; else X=2; fi\na $X", "2"),
        ("A=1\nif [[ -f x || $A == 1 ]]; then X=1; else X=2; fi\na $X", "1"),
        ("A=1\nif [ -f x ] || [ $A = 2 ]; then X=1; else X=2; fi\na $X", None),
        ('X=1\n[ -z "$X" ] && X=2\na $X', "1"),
        ('[ -z "$X" ] && X=2\na $X', "2"),
        ('if [ -n "$1" ]; then X=$1; else X=2; fi\na $X', "2"),
        ('X=1\n[ -n "$X" ] ||\n  X=2\na $X', "1"),
        ("X=1\n[ -f x ] && X=2\na $X", None),
        ("X=1\nA=1\n[ $A = 2 ] && { X=2; Y=3; }\na $X", "1"),
        ("X=1\ncd x && X=2\na $X", "2"),
        ("X=1\n(X=2; b)\na $X", "1"),
        ("M=2b\ncase $M in 2b) X=1;; 8b) X=2;; *) X=3;; esac\na $X", "1"),
        ("M=8b-x\ncase \"$M\" in\n  2b|1b)\n    X=1 ;;\n  8b*) X=2\n    ;;\n  *) X=3;;\nesac\na $X", "2"),
        ("case $M in 2b) X=1;; *) X=3;; esac\na $X", None),
        ("case $M in 2b) X=1;; *) X=1;; esac\na $X", "1"),
        ("X=1\nfor X in 2; do\na $X\ndone", "2"),
        ("X=1\nfor X in 2 3; do\na $X\ndone", None),
        ("X=1\nfor ((i=0; i<3; i++)); do X=2; done\na $X", None),
        ("X=1\nwhile [ $# -gt 0 ]; do case $1 in --x) X=$2; shift 2;; esac; done\na $X", None),
        ("elif\nelse\nfi\nesac\ndone\n}\nX=1\na $X", "1"),
    ],
)  # fmt: skip
def test_a_variable_has_the_value_of_the_branch_that_runs_or_none(script: str, word: str | None) -> None:
    found = [command.words[1] for command in commands_of(script) if command.words[0] == "a"]
    assert found == [NoValue() if word is None else word]


@pytest.mark.parametrize(
    ("script", "value", "is_passed"),
    [
        ("X=1 b; a", None, False),
        ("X=1 b && X=2 c | d\na", None, False),
        ("X=1\nX=2 env X=3 b\na", "1", False),
        ("X=1\n[ -f x ] || X=2 b\na", "1", False),
        ("X=1\nX+=2 b\na", "1", False),
        ("X=1 a", "1", True),
        ("X=1\nX=2 a", "2", True),
        ("X=1; a", "1", False),
        ("X=1  # of all\na", "1", False),
        ("X=1 > log\na", "1", False),
        ("export X=1 Y; a", "1", True),
        ("eval X=1\na", "1", False),
    ],
)
def test_a_variable_before_a_command_counts_for_it_alone(script: str, value: str | None, is_passed: bool) -> None:
    (found,) = (command for command in commands_of(script) if command.words[0] == "a")
    assert (found.variables.get("X"), "X" in found.exported) == (value, is_passed)


def test_the_words_of_a_command_do_not_see_the_variables_before_it() -> None:
    (command,) = commands_of("X=1\nX=2 Y=$X a $X")
    assert (command.words, command.variables) == (("a", "1"), {"X": "2", "Y": "2"})


def test_a_test_that_is_not_followed_is_named_with_its_line_and_its_variables() -> None:
    script = f"cat <<EOF > x\ntext\nEOF\nif [ -f x ]; then\n  LR=1e-5\nelse\n  LR=2e-5\nfi\n{TRAINER} $LR"
    job, notes = converted(script)
    assert job.training.learning_rate == Job.model_validate(job.model_dump()).training.learning_rate
    assert "run.sh, line 4: a test or a loop that is not followed; not known after it: LR" in notes
    assert "Not known, since the script does not set them: learning_rate" in notes


def test_a_training_inside_a_test_is_taken_to_run() -> None:
    job, notes = converted(f"LR=1e-5\nif [ -f x ]; then\n{TRAINER} $LR\nfi")
    assert job.training.learning_rate == 1e-5
    assert "run.sh, line 2: a test or a loop that is not followed; its training is taken to run once" in notes
    Path("job.yaml").unlink()
    assert "not followed" not in converted(f"mkdir -p x\nif [ ! -d x ]; then\nb\nfi\n{TRAINER} 1e-5")[1]


def test_all_trainings_of_a_script_are_named() -> None:
    job, notes = converted(f"swift infer --model MODEL\n{TRAINER} 1e-3\n{TRAINER} 2e-5 --seed 3")
    assert job.training.learning_rate == 2e-5
    assert (
        "The script starts 2 trainings, and the job is the one with the most options, of run.sh, line 3; not those of "
        "run.sh, line 2"
    ) in notes


@pytest.mark.parametrize(
    ("start", "devices"),
    [
        ("srun --nodes=2 --ntasks=2 --ntasks-per-node=1 torchrun --nnodes=2 --nproc_per_node=8", 16),
        ("srun --nodes=2 --ntasks=16 --ntasks-per-node=8 python", 16),
        ("srun --nodes=2 --ntasks=2 accelerate launch --num_processes 16", 16),
    ],
)
def test_a_task_of_slurm_may_start_several_processes(start: str, devices: int) -> None:
    job, _ = converted(f"{start} {TRAINER.partition('2 ')[2]} 1e-5")
    assert (job.hardware.devices, job.training.global_batch_samples) == (devices, 4 * devices)
