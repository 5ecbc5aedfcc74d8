"""Checkpoints and final weights: safetensors under Hugging Face names, whatever the layout, split and ZeRO stage."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deepspeed import comm
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoTokenizer

from trials import wire
from trials.engine.state import PARTS
from trials.run.session import Session

_STATE_FILE = "state.json"
_PREFIX = "checkpoint-"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Where a training stands, besides its tensors."""

    steps: int
    """Optimizer steps done in all."""
    plan: str
    """Id of the plan; another plan packs the samples into other steps."""
    data: str
    """Digest of the dataset's lengths."""


def latest_checkpoint(output: Path) -> tuple[Path, TrainingState] | None:
    """The newest whole checkpoint in `output`."""
    files = [file for file in output.glob(f"{_PREFIX}*/{_STATE_FILE}") if _steps_of(file.parent).isdigit()]
    if not files:
        return None
    newest = max(files, key=lambda file: int(_steps_of(file.parent)))
    return newest.parent, wire.decode(TrainingState, newest.read_text())


def _steps_of(folder: Path) -> str:
    return folder.name.removeprefix(_PREFIX)


def save_checkpoint(session: Session, output: Path, state: TrainingState) -> None:
    """Writes checkpoint-STEPS; every rank must call it. An older checkpoint is removed when the new one is whole."""
    final = output / f"{_PREFIX}{state.steps}"
    temporary = output / f".{final.name}.partial"
    _make_empty(session, temporary)
    state_of = session.engine.state
    tensors = {
        f"{part}:{name}": state_of.read(parameter, part).to("cpu").clone()
        for name, parameter in _named_parameters(session)
        for part in PARTS
    }
    if session.seat.data_rank == 0:
        save_file(tensors, temporary / f"stage-{session.seat.stage}.safetensors")
    comm.barrier()
    if session.seat.rank == 0:
        (temporary / _STATE_FILE).write_text(wire.encode(state))
        shutil.rmtree(final, ignore_errors=True)
        temporary.replace(final)
        for old in output.glob(f"{_PREFIX}*"):
            if old != final:
                shutil.rmtree(old)
    comm.barrier()


def load_checkpoint(session: Session, folder: Path, state: TrainingState) -> None:
    """Sets weights and optimizer states from a checkpoint, whatever layout and split wrote it."""
    files = [safe_open(path, framework="pt") for path in sorted(folder.glob("*.safetensors"))]
    where = {key: file for file in files for key in file.keys()}  # noqa: SIM118 (not a dict)
    session.engine.state.begin_writing(state.steps)
    for name, parameter in _named_parameters(session):
        for part in PARTS:
            key = f"{part}:{name}"
            session.engine.state.write(parameter, part, where[key].get_tensor(key).to(parameter.device))


def save_model(session: Session, folder: Path) -> None:
    """Writes the model so that `from_pretrained` loads it, with its tokenizer; every rank must call it."""
    temporary = folder.with_name(f".{folder.name}.partial")
    _make_empty(session, temporary)
    stage, stages = session.seat.stage, session.request.plan.layout.pipeline
    name = f"model-{stage + 1:05d}-of-{stages:05d}.safetensors"
    tied = session.engine.stage.tied
    weights = {
        name: parameter.detach().to("cpu").clone() for name, parameter in _named_parameters(session) if name not in tied
    }
    if session.seat.data_rank == 0:
        save_file(weights, temporary / name, metadata={"format": "pt"})
        (temporary / f"names-{stage}.json").write_text(json.dumps({"file": name, "names": sorted(weights)}))
    comm.barrier()
    if session.seat.rank == 0:
        _finish_model(session, temporary, folder)
    comm.barrier()


def _make_empty(session: Session, folder: Path) -> None:
    """Without what a rank that died here left behind; every rank must call it."""
    if session.seat.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    comm.barrier()


def _finish_model(session: Session, temporary: Path, folder: Path) -> None:
    weight_map: dict[str, str] = {}
    for part in sorted(temporary.glob("names-*.json")):
        names = json.loads(part.read_text())
        weight_map.update(dict.fromkeys(names["names"], names["file"]))
        part.unlink()
    index = {"metadata": {}, "weight_map": weight_map}
    (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))
    settings = session.request.job.model
    session.engine.stage.model.config.save_pretrained(temporary)
    AutoTokenizer.from_pretrained(settings.path, trust_remote_code=settings.trust_remote_code).save_pretrained(
        temporary
    )
    for extra in Path(settings.path).glob("*processor*.json"):
        shutil.copy(extra, temporary / extra.name)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.replace(folder)


def _named_parameters(session: Session) -> Iterator[tuple[str, nn.Parameter]]:
    """Hugging Face names and parameters of this rank's stage."""
    return iter(session.engine.stage.model.named_parameters())
