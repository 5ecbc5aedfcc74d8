"""The weights that a training writes, as transformers loads them, next to those of the last certified step."""

import math
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from trials.certification import SavedCount
from trials.engine.group import wait_for_all
from trials.job import LoraSection
from trials.model.family import load_family
from trials.model.skeleton import load_config
from trials.tasks.request import Request
from trials.tasks.session import Session
from trials.tasks.training.output import MODEL_FOLDER, TrainingRecord
from trials.tasks.training.trained_model import save_result

_NAMES_OF_ADAPTERS = (("base_model.model.", ""), (".modules_to_save.default", ""), (".default.", "."))
"""What peft adds to the names of a model's parameters."""


def write_saved(session: Session, scratch: Path, record: TrainingRecord, steps: int) -> None:
    """Write what the training would write after these steps into the folder; every rank must call it."""
    if session.coordinates.rank == 0:
        shutil.rmtree(scratch, ignore_errors=True)  # left by a process that died
        scratch.mkdir(parents=True)
    wait_for_all()
    save_result(session, scratch / MODEL_FOLDER, record, steps)


class SavedWeights:
    """The written model as `from_pretrained` of transformers, or of peft, makes it."""

    def __init__(self, request: Request, scratch: Path, base: Callable[[], nn.Module]) -> None:
        """`base` returns the model onto which adapters are loaded. Raise what loading raises."""
        self._folder = scratch / MODEL_FOLDER
        self._of_adapters = bool(request.job.training.lora.rank)
        self.faults: list[str] = []
        self.tensors: dict[str, torch.Tensor] = {}
        model = self._with_adapters(base(), request.job.training.lora) if self._of_adapters else self._whole(request)
        # A tied weight is there under each of its names.
        for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
            self.tensors[plain_name(name) if self._of_adapters else name] = tensor.detach()
        self._model = model

    @property
    def size(self) -> int:
        """Bytes of the written weights."""
        return sum(path.stat().st_size for path in self._folder.glob("*.safetensors"))

    def difference(self, name: str, expected: torch.Tensor) -> str | None:
        """Describe how a loaded weight differs from what it must be, bit by bit; None where it does not."""
        found = self.tensors.get(name)
        if found is None:
            return f"the saved weights lack {name}"
        if found.dtype != expected.dtype or found.shape != expected.shape:
            return (
                f"the saved {name} is {found.dtype} of shape {tuple(found.shape)} instead of {expected.dtype} of "
                f"{tuple(expected.shape)}"
            )
        if torch.equal(found, expected):
            return None
        share = (found.double() - expected.double()).norm() / expected.double().norm()
        return f"the saved {name} differs by {float(share):.2g} of its norm from the weight after the last step"

    def stored_numbers(self) -> tuple[int, int]:
        """Return (numbers in the files, numbers of the loaded model with each tied weight once)."""
        stored = 0
        for path in self._folder.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                # get_slice reads no tensor.
                stored += sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
        state = {tensor.data_ptr(): tensor.numel() for tensor in self._model.state_dict().values() if tensor.numel()}
        return stored, sum(state.values())

    def _whole(self, request: Request) -> nn.Module:
        trusts = request.job.model.trust_remote_code
        family = load_family(load_config(str(self._folder), trust_remote_code=trusts))
        model: nn.Module
        model, told = family.AUTO_MODEL.from_pretrained(
            self._folder, dtype="auto", output_loading_info=True, trust_remote_code=trusts
        )
        for what, text in (
            ("missing_keys", "lack"),
            ("unexpected_keys", "have besides"),
            ("mismatched_keys", "misshape"),
        ):
            if found := sorted(map(str, told.get(what, ()))):
                self.faults.append(f"the saved weights {text} {found[0]}")
        return model

    def _with_adapters(self, base: nn.Module, lora: LoraSection) -> nn.Module:
        from peft import PeftModel  # noqa: PLC0415  # it takes a second to import
        from peft.tuners.lora import LoraLayer  # noqa: PLC0415

        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            loaded: nn.Module = PeftModel.from_pretrained(base, self._folder, autocast_adapter_dtype=False)
        if missing := [str(each.message) for each in told if "missing" in str(each.message)]:
            self.faults.append(f"the saved adapter is not whole: {missing[0][:200]}")
        assert lora.rank is not None  # else there are no adapters
        found = {scale for each in loaded.modules() if isinstance(each, LoraLayer) for scale in each.scaling.values()}
        if found != {lora.alpha / lora.rank}:
            scales = ", ".join(f"{scale:g}" for scale in sorted(found)) or "nothing"
            self.faults.append(
                f"the saved adapter scales its output by {scales} instead of {lora.alpha / lora.rank:g}, which is "
                f"training.lora.alpha: {lora.alpha} by rank: {lora.rank}"
            )
        return loaded


def compare_saved(
    request: Request,
    scratch: Path,
    wanted: Iterator[tuple[str, torch.Tensor]],
    base: Callable[[], nn.Module],
    rank: int,
) -> tuple[SavedCount | None, list[str]]:
    """Compare the written weights with those that `wanted` yields on every rank; rank 0 loads them and reports."""
    saved, faults, compared = None, list[str](), 0
    if rank == 0:
        try:
            saved = SavedWeights(request, scratch, base)
        except Exception as error:  # loading raises what it likes, and the others wait
            faults.append(f"the saved weights cannot be loaded: {type(error).__name__}: {str(error)[:200]}")
    wait_for_all()
    different = []
    for name, expected in wanted:
        if saved:
            compared += 1
            different += [text] if (text := saved.difference(name, expected)) else []
    if saved is None:
        return None, faults
    faults += [*saved.faults, *different[:1]]
    stored, held = saved.stored_numbers()
    if not request.job.training.lora.rank and stored != held:
        faults.append(f"the files of the saved weights hold {stored} numbers instead of {held}")
    return SavedCount(tensors=compared, size=saved.size), faults


def remove_scratch(scratch: Path | None, rank: int) -> None:
    """Remove what was written."""
    if scratch is not None and rank == 0:
        with suppress(OSError):
            shutil.rmtree(scratch)


def plain_name(name: str) -> str:
    """Return the name of a parameter without what peft adds to it."""
    for added, instead in _NAMES_OF_ADAPTERS:
        name = name.replace(added, instead)
    return name
