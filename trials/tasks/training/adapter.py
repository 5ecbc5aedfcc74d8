"""The result of a training with LoRA: a folder that `PeftModel.from_pretrained` loads onto the base model."""

from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig
from safetensors import safe_open

from trials.engine.group import wait_for_all
from trials.engine.state import WEIGHT, kept
from trials.model.adapters import NAME
from trials.model.hub import published_commit, published_name
from trials.tasks.session import Session
from trials.tasks.training.checkpoint import add_processor, save_tensors, state_of, trained_parameters, writing
from trials.tasks.training.output import RECORD_FILE, TrainingRecord, publish

_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""Prefix of the parameters' names in peft's model."""


def save_adapter(session: Session, folder: Path, record: TrainingRecord, steps: int) -> None:
    """Write the adapters, any trained projector, configuration and tokenizer; every rank must call it.

    An existing `folder` is renamed. Raise TrialsError when the adapter cannot be written to the disk.
    """
    weights = (
        (peft_name(name), session.engine.state.read(parameter, WEIGHT).to("cpu", parameter.dtype, copy=True))
        for name, parameter in trained_parameters(session)
    )
    tensors = kept(weights, keeps=session.coordinates.leads_stage)
    with writing(session, folder, record) as partial:
        if session.coordinates.leads_stage:
            save_tensors(tensors, partial / f"stage-{session.coordinates.stage}.safetensors")
        wait_for_all()
        if session.coordinates.rank == 0:
            _join(partial)
            add_settings(session, partial)
            publish(partial, folder, RECORD_FILE, state_of(partial, record, steps))
    wait_for_all()


def add_settings(session: Session, folder: Path) -> None:
    """Write the adapter's configuration, the tokenizer and the processor's settings."""
    _configuration(session).save_pretrained(str(folder))
    add_processor(session.request.job.model, folder)


def peft_name(name: str) -> str:
    """Return the name of a trained parameter in an adapter's file."""
    return _PREFIX + name.replace(f".{NAME}.", ".")


def _join(folder: Path) -> None:
    """Join the files of the stages to one, as peft reads it: adapters are small."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("stage-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        path.unlink()
    save_tensors(tensors, folder / _WEIGHTS, {"format": "pt"})


def _configuration(session: Session) -> LoraConfig:
    stage, job = session.engine.stage, session.request.job
    config = cast(LoraConfig, stage.model.peft_config[NAME])
    config.base_model_name_or_path = published_name(job.model.path)
    config.revision = published_commit(job.model.path)
    config.inference_mode = True
    if job.training.lora.train_projector:
        config.modules_to_save = list(stage.chain.paths_of("projector"))
    return config
