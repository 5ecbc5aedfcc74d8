"""Settings of jobs as other trainers write them: `init --from`, then `export --to`, then `init --from` again."""

from pathlib import Path
from typing import Any

import pytest

from autotune.draft.arguments import Arguments
from autotune.draft.settings import draft_of
from autotune.draft.template import job_text
from autotune.draft.trainers import Trainer, ms_swift
from autotune.exporting.settings import common_settings, not_carried
from autotune.exporting.trainers import EXPORTS, kept_of, own_settings
from autotune.exporting.trainers import ms_swift as to_ms_swift
from autotune.job_file import job_of_text
from trials import plugins
from trials.job import Job

MS_SWIFT: dict[str, Any] = {"model": "org/model", "tuner_type": "full", "dataset": ["train.jsonl"]}
OF_MS_SWIFT = (
    {"learning_rate": 3e-5},
    {"vit_lr": 2e-6, "freeze_vit": False},
    {"aligner_lr": 2e-6, "freeze_aligner": False},
    {"weight_decay": 0.0},
    {"save_total_limit": 7},
    {"seed": 5},
    {"dataloader_num_workers": 3},
    {"output_dir": "elsewhere"},
    {"save_steps": 40},
    {"save_strategy": "epoch"},
    {"val_dataset": ["held.jsonl"], "eval_steps": 30},
    {"torch_dtype": "float32"},
    {"torch_dtype": "bfloat16"},
    {"bf16": True},
    {"num_train_epochs": 4},
    {"max_steps": 90, "num_train_epochs": 4},
    {"lr_scheduler_type": "linear"},
    {"lr_scheduler_type": "constant"},
    {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 9},
    {"warmup_ratio": 0.05},
    {"adam_beta1": 0.8, "adam_beta2": 0.9},
    {"max_grad_norm": 0.5},
    {"max_grad_norm": 0},
    {"freeze_vit": True, "freeze_aligner": False, "freeze_llm": True},
    {"freeze_vit": False, "freeze_aligner": False, "freeze_llm": False},
    {"tuner_type": "lora", "lora_rank": 4, "lora_alpha": 12, "lora_dropout": 0},
    {"tuner_type": "lora", "freeze_vit": False, "freeze_aligner": True},
    {"tuner_type": "lora", "target_modules": ["q_proj", "v_proj"]},
    {"train_type": "lora"},
)
"""Settings that `init --from` takes from ms-swift. Those of data, batch and plan an export decides anew."""
DECIDED = ("data.", "evaluation.sources", "training.global_batch_samples", "hardware.")


def drafted(reader: Trainer, values: dict[str, Any]) -> dict[str, Any]:
    """The keys of the job that `init --from` writes."""
    assert reader.recognises(Arguments(values=values))
    found = draft_of(Arguments(values=values), 2).values
    return {key: value for key, value in found.items() if not key.startswith(DECIDED)}


def job_of(values: dict[str, Any]) -> Job:
    return job_of_text(job_text(draft_of(Arguments(values=values), 2)).encode(), Path("/"))


def absolute(values: dict[str, Any]) -> dict[str, Any]:
    """The keys with the paths that the job makes absolute."""
    return {key: str(Path("/", value)) if key == "training.output" else value for key, value in values.items()}


@pytest.mark.parametrize("given", OF_MS_SWIFT, ids=str)
def test_ms_swifts_settings_survive_the_way_there_and_back(given: dict[str, Any]) -> None:
    values = {**MS_SWIFT, **given}
    job = job_of(values)
    written = own_settings(common_settings(job), ms_swift.NAMES, to_ms_swift.ARGUMENTS)
    data = {name: values[name] for name in ("dataset", "val_dataset") if name in values}
    again = drafted(ms_swift, written | data)
    before = absolute(drafted(ms_swift, values))
    assert {key: again.get(key) for key in before} == before
    assert job_of({**written, "dataset": ["train.jsonl"]}).training == job.training


def test_the_settings_tried_cover_the_table() -> None:
    """Each common name that an export writes is the name of a setting above, by the trainer's own name."""
    tried = {name for given in OF_MS_SWIFT for name in (*MS_SWIFT, *given)} | {"eval_strategy"}
    assert set(to_ms_swift.ARGUMENTS) <= tried


@pytest.mark.parametrize("name", plugins.names(EXPORTS))
def test_an_export_and_what_reads_it_are_of_one_trainer(name: str) -> None:
    exporter = plugins.load(EXPORTS, name)
    assert exporter.TITLE == exporter.READER.TITLE


def test_what_an_export_does_not_decide_is_kept_under_every_name() -> None:
    present = {"train_type": "lora", "tuner_type": "full", "system": "Be brief.", "attn_impl": "sdpa", "lr": 1}
    kept = kept_of(present, ("tuner_type", "attn_impl"), ms_swift.NAMES)
    assert kept == {"system": "Be brief.", "lr": 1}


def test_what_no_trainer_takes_over_is_said() -> None:
    values = {**MS_SWIFT, "learning_rate": 1e-4}
    job = job_of(values)
    changed = job.model_copy(update={"training": job.training.model_copy(update={"loss_weighting": "square"})})
    assert not any("loss_weighting" in each for each in not_carried(job))
    assert any("loss_weighting: square" in each for each in not_carried(changed))


def test_a_rate_of_the_language_model_is_that_of_the_rest() -> None:
    job = job_of({**MS_SWIFT, "freeze_vit": False, "freeze_aligner": True})
    rates = job.training.learning_rates.model_copy(update={"language": 3e-6})
    job = job.model_copy(update={"training": job.training.model_copy(update={"learning_rates": rates})})
    found = common_settings(job)
    assert (found["learning_rate"], found["vision_lr"]) == (3e-6, 1e-5)
    assert "projector_lr" not in found
