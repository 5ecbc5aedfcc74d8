"""Settings of jobs as other trainers write them: `init --from`, then `export --to`, then `init --from` again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.draft.arguments import Arguments
from autotune.draft.settings import draft_of
from autotune.draft.template import job_text
from autotune.draft.trainers import TRAINERS, Trainer, llama_factory, ms_swift, transformers_trainer
from autotune.exporting.settings import common_settings, learning_left_out, tuned
from autotune.exporting.trainers import EXPORTS, kept_of, own_settings
from autotune.job_file import job_of_text
from trials import plugins
from trials.job import Job

OF_TRAINER: tuple[dict[str, Any], ...] = (
    {"learning_rate": 3e-5},
    {"weight_decay": 0.0},
    {"save_total_limit": 7},
    {"seed": 5},
    {"dataloader_num_workers": 3},
    {"output_dir": "elsewhere"},
    {"save_steps": 40, "save_strategy": "steps"},
    {"save_strategy": "epoch"},
    {"bf16": True},
    {"num_train_epochs": 4},
    {"max_steps": 90, "num_train_epochs": 4},
    {"lr_scheduler_type": "linear"},
    {"lr_scheduler_type": "constant"},
    {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 9},
    {"lr_scheduler_type": "cosine", "warmup_ratio": 0.05},
    {"adam_beta1": 0.8, "adam_beta2": 0.9},
    {"max_grad_norm": 0.5},
    {"max_grad_norm": 0},
)
"""Settings of transformers' Trainer, which have the same names everywhere."""
TOGETHER: dict[str, Any] = {
    "learning_rate": 3e-5,
    "weight_decay": 0.0,
    "save_total_limit": 7,
    "seed": 5,
    "dataloader_num_workers": 3,
    "output_dir": "elsewhere",
    "save_steps": 40,
    "save_strategy": "steps",
    "bf16": True,
    "max_steps": 90,
    "num_train_epochs": 4,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.05,
    "adam_beta1": 0.8,
    "adam_beta2": 0.9,
    "max_grad_norm": 0.5,
}
SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "ms-swift": (
        *OF_TRAINER,
        {"vit_lr": 2e-6, "freeze_vit": False},
        {"aligner_lr": 2e-6, "freeze_aligner": False},
        {"val_dataset": ["held.jsonl"], "eval_steps": 30},
        {"torch_dtype": "float32"},
        {"torch_dtype": "bfloat16"},
        {"freeze_vit": True, "freeze_aligner": False, "freeze_llm": True},
        {"freeze_vit": False, "freeze_aligner": False, "freeze_llm": False},
        {"tuner_type": "lora", "lora_rank": 4, "lora_alpha": 12, "lora_dropout": 0},
        {"tuner_type": "lora", "freeze_vit": False, "freeze_aligner": True},
        {"tuner_type": "lora", "target_modules": ["q_proj", "v_proj"]},
    ),
    "qwen-vl": (
        *OF_TRAINER,
        {"vision_tower_lr": 2e-6, "mm_projector_lr": 3e-6},
        {"tune_mm_vision": True, "tune_mm_mlp": False, "tune_mm_llm": False},
        {"tune_mm_vision": False, "tune_mm_mlp": True, "tune_mm_llm": True},
        {"lora_enable": True, "lora_r": 4, "lora_alpha": 12, "lora_dropout": 0},
    ),
    "internvl": (
        *OF_TRAINER,
        {"freeze_backbone": True, "freeze_mlp": False, "freeze_llm": True},
        {"use_llm_lora": 16, "freeze_backbone": True, "freeze_mlp": True, "freeze_llm": True},
    ),
    "llama-factory": (
        *OF_TRAINER,
        {"eval_dataset": "held", "eval_steps": 30},
        {"freeze_vision_tower": True, "freeze_multi_modal_projector": False, "freeze_language_model": True},
        {"freeze_vision_tower": False, "freeze_multi_modal_projector": False},
        {"finetuning_type": "lora", "lora_rank": 4, "lora_alpha": 12, "lora_dropout": 0},
        {"finetuning_type": "lora", "freeze_vision_tower": False, "lora_target": "q_proj,v_proj"},
    ),
}
"""Settings that `init --from` takes, by trainer. Those of data, batch and plan an export decides anew."""
USUAL: dict[str, dict[str, Any]] = {
    "ms-swift": {"model": "org/model", "tuner_type": "full", "dataset": ["train.jsonl"]},
    "qwen-vl": {
        "model_name_or_path": "org/model",
        "dataset_use": "mine",
        "per_device_train_batch_size": 1,
        "tune_mm_vision": True,
        "tune_mm_mlp": True,
        "tune_mm_llm": True,
    },
    "internvl": {
        "model_name_or_path": "org/model",
        "meta_path": "meta.json",
        "conv_style": "internvl2_5",
        "freeze_backbone": False,
        "freeze_mlp": False,
        "freeze_llm": False,
    },
    "llama-factory": {"model_name_or_path": "org/model", "finetuning_type": "full", "dataset": "mine", "stage": "sft"},
}
NAMES = {
    "ms-swift": ms_swift.NAMES,
    "qwen-vl": transformers_trainer.NAMES,
    "internvl": transformers_trainer.NAMES,
    "llama-factory": llama_factory.NAMES,
}
KEPT = (
    "dataset",
    "dataset_use",
    "meta_path",
    "conv_style",
    "val_dataset",
    "eval_dataset",
    "stage",
    "per_device_train_batch_size",
)
DECIDED = (
    "data.sources",
    "data.oversize",
    "data.max_tokens",
    "evaluation.sources",
    "training.global_batch_samples",
    "hardware.",
)


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


def each_setting() -> Iterator[Any]:
    """Yield those that all trainers have, together and for `make test-long` alone, and those of one trainer."""
    for name, every in SETTINGS.items():
        yield pytest.param(name, TOGETHER, id=f"{name}-together")
        for given in every:
            is_usual = given in OF_TRAINER
            yield pytest.param(name, given, id=f"{name}-{given}", marks=pytest.mark.long if is_usual else ())


@pytest.mark.parametrize(("name", "given"), [*each_setting()])
def test_settings_survive_the_way_there_and_back(name: str, given: dict[str, Any]) -> None:
    exporter = plugins.load(EXPORTS, name)
    values = {**USUAL[name], **given}
    job = job_of(values)
    common = common_settings(job) | tuned(job)
    written = own_settings(common, NAMES[name], exporter.ARGUMENTS)
    data = {own: value for own, value in values.items() if own in KEPT}
    again, before = (absolute(drafted(exporter.READER, each)) for each in (written | data, values))
    assert {key: again.get(key) for key in before} == before
    assert job_of(written | data).training == job.training


@pytest.mark.parametrize("name", SETTINGS)
def test_the_settings_tried_cover_the_table(name: str) -> None:
    """Each argument that an export writes is that of a setting above."""
    tried = {own for given in SETTINGS[name] for own in (*USUAL[name], *given)} | {"eval_strategy"}
    assert set(plugins.load(EXPORTS, name).ARGUMENTS) <= tried


@pytest.mark.parametrize("name", plugins.names(EXPORTS))
def test_init_reads_the_configuration_of_each_trainer(name: str) -> None:
    exporter = plugins.load(EXPORTS, name)
    assert exporter.READER in dict(plugins.each(TRAINERS)).values()


def test_what_an_export_does_not_decide_is_kept_under_every_name() -> None:
    present = {"train_type": "lora", "tuner_type": "full", "system": "Be brief.", "attn_impl": "sdpa", "lr": 1}
    kept = kept_of(present, ("tuner_type", "attn_impl"), ms_swift.NAMES)
    assert kept == {"system": "Be brief.", "lr": 1}


def test_what_no_trainer_takes_over_is_said() -> None:
    values = {**USUAL["ms-swift"], "learning_rate": 1e-4}
    job = job_of(values)
    changed = job.model_copy(update={"training": job.training.model_copy(update={"loss_weighting": "square"})})
    assert not any("loss_weighting" in each for each in learning_left_out(job))
    assert any("loss_weighting: square" in each for each in learning_left_out(changed))


def test_a_rate_of_the_language_model_is_that_of_the_rest() -> None:
    job = job_of({**USUAL["ms-swift"], "freeze_vit": False, "freeze_aligner": True})
    rates = job.training.learning_rates.model_copy(update={"language": 3e-6})
    job = job.model_copy(update={"training": job.training.model_copy(update={"learning_rates": rates})})
    found = common_settings(job)
    assert (found["learning_rate"], found["vision_lr"]) == (3e-6, 1e-5)
    assert "projector_lr" not in found
