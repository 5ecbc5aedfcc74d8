"""Checkpoints and final weights: safetensors with Hugging Face names, independent of layout, split and ZeRO stage."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoTokenizer

from trials.engine.group import wait_for_all
from trials.engine.state import PARTS, WEIGHT, kept
from trials.errors import Unwritable
from trials.job import ModelSection
from trials.model.conversion import stored_form
from trials.model.hub import local_folder
from trials.model.paths import tensors_at
from trials.tasks.session import Session, not_finite, unused_tensors
from trials.tasks.training.output import (
    RECORD_FILE,
    STATE_FILE,
    TrainingRecord,
    TrainingState,
    checkpoint_folder,
    describe_file,
    partial_folder,
    publish,
    remove_old_checkpoints,
)
from trials.whole_file import sync

_PROCESSOR = ("*processor*.json", "generation_config.json", "chat_template*")
"""Files of a model's folder that are written as they are."""


def save_checkpoint(session: Session, output: Path, record: TrainingRecord, steps: int) -> None:
    """Write checkpoint-STEPS, verify it, and remove those beyond `keep_checkpoints`; every rank must call it.

    Raise Unwritable when it cannot be written to the disk, and NotFinite for a weight or moment that is not finite.
    Earlier checkpoints stay then.
    """
    leads = session.coordinates.leads_stage
    # Under ZeRO reading is collective: all ranks of a stage read, and the first one keeps the copies.
    tensors = kept(_finite_parts(session), keeps=leads)
    with writing(session, checkpoint_folder(output, steps), record) as partial:
        if leads:
            save_tensors(tensors, partial / f"stage-{session.coordinates.stage}.safetensors")
        # Rank 0 lists the files once all stages have written theirs.
        wait_for_all()
        if session.coordinates.rank == 0:
            publish(partial, checkpoint_folder(output, steps), STATE_FILE, state_of(partial, record, steps))
            remove_old_checkpoints(output, record, steps, session.request.job.training.keep_checkpoints)
    wait_for_all()


def _finite_parts(session: Session) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield copies of the weights and moments that train. Raise NotFinite for one that is not finite."""
    for name, parameter in trained_parameters(session):
        # Two stages may hold a tied weight, with equal moments: it is written once, by the name that all plans know.
        if name in session.engine.stage.tied:
            continue
        for part in PARTS:
            tensor = session.engine.state.read(parameter, part).to("cpu", copy=True)
            if not tensor.isfinite().all():
                raise not_finite(f"{part}:{name}", tensor[~tensor.isfinite()][0].item())
            yield f"{part}:{name}", tensor


def state_of(partial: Path, record: TrainingRecord, steps: int) -> TrainingState:
    """Return the state of a training with the files of the folder, which are on the disk then."""
    paths = sorted(partial.rglob("*"))  # a tokenizer writes its further chat templates to a folder
    names = (path.relative_to(partial).as_posix() for path in paths if path.is_file())
    files = tuple(describe_file(partial, name) for name in names)
    sync(*paths)
    kept = record.settings
    return TrainingState(steps=steps, plan=kept.plan, data=kept.data, training=record.id, files=files)


@contextmanager
def writing(session: Session, final: Path, record: TrainingRecord) -> Iterator[Path]:
    """Yield an empty folder in which `final` is written; every rank must enter the context."""
    partial = partial_folder(final, record)
    try:
        if session.coordinates.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # left by a process of this training that died
            partial.mkdir()
        wait_for_all()
        yield partial
    except (OSError, SafetensorError) as error:
        raise Unwritable(f"{final} cannot be written ({error}); free some space there") from error


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write the tensors to the disk, read them back and compare them."""
    path.touch()
    mode = path.stat().st_mode  # of a new file under this umask
    save_file(tensors, path, metadata=metadata)
    path.chmod(mode)  # safetensors creates files that only their owner can read
    sync(path)
    with safe_open(path, framework="pt") as file:
        for name, tensor in tensors.items():
            if not torch.equal(file.get_tensor(name), tensor):
                raise OSError(f"{name} in {path} differs from what was written; check the disk")


def load_checkpoint(session: Session, folder: Path, steps: int) -> None:
    """Set weights and optimizer states from a checkpoint of any layout, split and ZeRO stage.

    Every rank must call it, and all return together.
    """
    files = [safe_open(path, framework="pt") for path in sorted(folder.glob("*.safetensors"))]
    where = {key: file for file in files for key in file.keys()}  # noqa: SIM118 (not a dict)
    session.engine.state.create_moments(steps)
    for name, parameter in trained_parameters(session):
        for part in PARTS:
            key = f"{part}:{session.engine.stage.tied.get(name, name)}"
            session.engine.state.write(parameter, part, where[key].get_tensor(key).to(parameter.device))
    wait_for_all()  # a stage may have far more to read than another


def save_model(session: Session, folder: Path, record: TrainingRecord, steps: int) -> None:
    """Write the model so that `from_pretrained` loads it, with its tokenizer; every rank must call it.

    An existing `folder` is renamed. Raise Unwritable when the model cannot be written to the disk.
    """
    stage, stages = session.coordinates.stage, session.request.plan.layout.pipeline
    file, leads = f"model-{stage + 1:05d}-of-{stages:05d}.safetensors", session.coordinates.leads_stage
    tensors = kept(_weights(session), keeps=leads)
    if session.coordinates.rank == 0:
        tensors |= unused_tensors(session.request, session.device)
    with writing(session, folder, record) as partial:
        if leads:
            weights = stored_form(session.engine.stage.model, tensors)
            save_tensors(weights, partial / file, {"format": "pt"})
            (partial / f"names-{stage}.json").write_text(json.dumps({"file": file, "names": sorted(weights)}))
        wait_for_all()
        if session.coordinates.rank == 0:
            _add_index(partial)
            add_settings(session, partial)
            publish(partial, folder, RECORD_FILE, state_of(partial, record, steps))
    wait_for_all()


def _weights(session: Session) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield copies of the tensors of this rank's stage that belong to a model folder."""
    stage = session.engine.stage
    for name, parameter in stage.model.named_parameters():
        # A tied weight is written once, under the name of the weight that it is tied to.
        if name not in stage.tied:
            yield name, session.engine.state.read(parameter, WEIGHT).to("cpu", parameter.dtype, copy=True)
    # Buffers, such as a router's correction bias.
    for path in stage.paths:
        for name, tensor in tensors_at(stage.model, path).items():
            if not isinstance(tensor, nn.Parameter):
                yield name, tensor.to("cpu", copy=True)


def _add_index(folder: Path) -> None:
    """Write the index of the weights."""
    weight_map: dict[str, str] = {}
    for part in sorted(folder.glob("names-*.json")):
        names = json.loads(part.read_text())
        weight_map.update(dict.fromkeys(names["names"], names["file"]))
        # Only the way in which stages tell rank 0 their tensors: no part of a model folder.
        part.unlink()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))


def add_settings(session: Session, folder: Path) -> None:
    """Write the configuration, the tokenizer and the processor's settings."""
    model = session.engine.stage.model
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    add_processor(session.request.job.model, folder)


def add_processor(model: ModelSection, folder: Path) -> None:
    """Write the tokenizer and the settings of the processor."""
    source = local_folder(model.path, _PROCESSOR)
    tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    # transformers refuses a folder with both chat_template.json and templates in .jinja files.
    is_legacy = (source / "chat_template.json").is_file()
    tokenizer.save_pretrained(folder, save_jinja_files=not is_legacy)
    for pattern in _PROCESSOR:
        for extra in filter(Path.is_file, source.glob(pattern)):
            shutil.copy(extra, folder / extra.name)


def trained_parameters(session: Session) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the parameters of this rank's stage that train, with their Hugging Face names."""
    parameters = session.engine.stage.model.named_parameters()
    return ((name, parameter) for name, parameter in parameters if parameter.requires_grad)
