"""What `init --from` makes of DeepSpeed's JSON, which leaves much to a script that is not read."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autotune.cli import main
from autotune.job_file import load_job
from tests.programs.users import refusal
from trials.job import Job, TrainingSection

DEEPSPEED: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_max_lr": 1e-4,
            "warmup_num_steps": 100,
            "warmup_type": "linear",
            "total_num_steps": 1000,
        },
    },
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
}
DEFAULT = TrainingSection.model_fields


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's folder with a model and data; it is the current one."""
    (tmp_path / "MODEL").mkdir()
    (tmp_path / "train.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)


def converted(**changes: Any) -> tuple[Job, str]:
    """The job for the configuration with these sections, None for one that it lacks, and the notes."""
    content = {key: value for key, value in {**DEEPSPEED, **changes}.items() if value is not None}
    Path("ds.json").write_text(json.dumps(content, indent="\t"))
    Path("job.yaml").unlink(missing_ok=True)
    answer = CliRunner().invoke(main, ["init", "MODEL", "train.jsonl", "--json", "--devices", "2", "--from", "ds.json"])
    assert answer.exit_code == 0, answer.output
    return load_job(Path("job.yaml")), "\n".join(json.loads(answer.stdout)["notes"])


def scheduler(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"type": kind, "params": parameters}


def test_a_configuration_of_deepspeed_becomes_a_job() -> None:
    job, notes = converted()
    training = job.training
    assert (training.global_batch_samples, training.learning_rate, training.betas) == (16, 1e-4, (0.9, 0.95))
    assert (training.schedule, training.warmup, training.max_steps) == ("linear", 100, 1000)
    assert (training.clip_norm, training.weight_decay) == (1.0, 0.1)
    assert "differs" not in notes


def test_what_deepspeed_leaves_to_the_script_is_named_and_keeps_the_default() -> None:
    job, notes = converted(bf16={"enabled": "auto"}, gradient_clipping="auto")
    assert (job.model.dtype, job.training.clip_norm) == ("bfloat16", None)
    assert (
        "`auto`, so decided by a script or a model that was not read; check them in the job: bf16, max_grad_norm"
        in notes
    )


def test_without_an_optimizer_and_a_schedule_those_of_the_script_are_not_known() -> None:
    job, notes = converted(optimizer=None, scheduler=None, bf16=None)
    for name in ("learning_rate", "weight_decay", "betas", "schedule", "warmup"):
        assert getattr(job.training, name) == DEFAULT[name].default
    assert job.model.dtype == "bfloat16"
    names = "adam_beta1, adam_beta2, bf16, learning_rate, lr_scheduler_type, train_batch_size, warmup_steps"
    assert f"check them in the job: {names}, weight_decay" in notes


@pytest.mark.parametrize(
    ("section", "rate", "warmup", "note"),
    [
        (scheduler("WarmupLR", warmup_num_steps=500, warmup_type="linear", warmup_max_lr=3e-5), 3e-5, 500, None),
        (scheduler("WarmupLR", warmup_max_lr=3e-5), 3e-5, 1000, "scheduler.params.warmup_type: log"),
        (scheduler("WarmupLR"), 1e-4, 1000, "scheduler.params.warmup_max_lr: not given, and 0.001 in older versions"),
        (scheduler("WarmupDecayLR", total_num_steps=2000), 1e-3, 1000, "scheduler.params.warmup_type: log"),
        (scheduler("WarmupCosineLR", total_num_steps=2000, cos_min_ratio=0.1), 1e-4, 1000, "cos_min_ratio: 0.1"),
        (
            scheduler("OneCycle", cycle_max_lr=0.1),
            DEFAULT["learning_rate"].default,
            DEFAULT["warmup"].default,
            "scheduler.params.cycle_max_lr: 0.1",
        ),
    ],
)
def test_the_schedule_of_deepspeed_has_its_own_rate_and_defaults(
    section: dict[str, Any], rate: float, warmup: float, note: str | None
) -> None:
    job, notes = converted(scheduler=section)
    assert (job.training.learning_rate, job.training.warmup) == (rate, warmup)
    assert (note or "") in notes
    assert ("differs" in notes) == bool(note)
    assert ("the schedule OneCycle is not supported" in notes) == (section["type"] == "OneCycle")


@pytest.mark.parametrize(
    ("kind", "parameter", "note"),
    [
        ("AdamW", {"eps": 1e-5}, "optimizer.params.eps: 1e-05"),
        ("Adam", {"adam_w_mode": False}, "optimizer.params.adam_w_mode: False"),
        ("AdamW", {"adam_w_mode": False, "eps": "auto", "torch_adam": True}, None),
    ],
)
def test_parameters_of_the_optimizer_that_a_job_lacks_are_named(
    kind: str, parameter: dict[str, Any], note: str | None
) -> None:
    notes = converted(optimizer={"type": kind, "params": {"lr": 1e-4, **parameter}})[1]
    assert (f"so the training differs: {note}" in notes) if note else ("differs" not in notes)


@pytest.mark.parametrize(("steps", "samples"), [(None, 8), (3, 24), ("auto", DEFAULT["global_batch_samples"].default)])
def test_deepspeed_accumulates_no_steps_that_it_is_not_told(steps: Any, samples: int) -> None:
    job, notes = converted(train_batch_size=None, gradient_accumulation_steps=steps)
    assert job.training.global_batch_samples == samples
    assert ("not that of the script, which does not set gradient_accumulation_steps" in notes) == (steps == "auto")


def test_what_deepspeed_calls_a_curriculum_is_not_taken_over() -> None:
    """It cuts all samples to a length that rises."""
    job, notes = converted(curriculum_learning={"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 64})
    assert job.training.curriculum.steps is None
    assert "so the training differs: curriculum_learning" in notes


def test_what_deepspeed_offloads_is_named() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}}
    assert "Not taken over: offload_optimizer" in converted(zero_optimization=zero)[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_batch_size": 33}, "train_batch_size: 33 is not 4 per device x 2"),
        ({"bf16": True}, "bf16 is True; write an object"),
        ({"optimizer": {"type": "Lion"}}, "optimizer.type: Lion"),
    ],
)
def test_a_configuration_of_deepspeed_that_cannot_be_used_is_refused(changes: dict[str, Any], message: str) -> None:
    Path("ds.json").write_text(json.dumps({**DEEPSPEED, **changes}))
    code, text = refusal("init", "--from", "ds.json", "--devices", "2", "MODEL", "train.jsonl")
    assert code == 2
    assert message in text
    assert not Path("job.yaml").exists()


def test_a_script_with_an_argument_of_deepspeeds_is_none_of_its_configurations() -> None:
    trainer = "torchrun --nproc_per_node 2 train.py --model_name_or_path MODEL --data_path train.jsonl --bf16 True"
    Path("run.sh").write_text(f"{trainer} --per_device_train_batch_size 4 --train_batch_size 8 --learning_rate 1e-5")
    answer = CliRunner().invoke(main, ["init", "--from", "run.sh"])
    assert answer.exit_code == 0, answer.output
    assert load_job(Path("job.yaml")).training.learning_rate == 1e-5
    Path("other.sh").write_text(
        "deepspeed --module openrlhf.cli.train_sft --pretrain M --dataset d.jsonl --train_batch_size 128"
    )
    assert "not those of a known trainer" in refusal("init", "--from", "other.sh", "--out", "b.yaml")[1]
