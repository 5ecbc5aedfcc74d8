"""Faults of a training that a certificate must name: of what it learns, of its updates, and of what it writes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tests.machines.planted.gradients import ADAPTER_FAULTS, KEY_FAULTS, STAGE_FAULTS
from tests.machines.planted.writing import SAVING_FAULTS
from trials.channels.folder import FolderChannel
from trials.data.records.sample import IGNORED, Encoded, Encoder, Sample
from trials.engine import base, engine, optimizer
from trials.engine.base import EngineBase
from trials.engine.gradients.flat import FlatGradients
from trials.model import trained
from trials.model.inputs import encoders
from trials.model.stage import StageModule
from trials.run.serving import serve
from trials.tasks import session
from trials.tasks.training import schedule, training

Fault = Callable[[], AbstractContextManager[Any]]


# --- inputs -------------------------------------------------------------------------------------------------------


def shifted_labels(each: Encoded) -> Encoded:
    """Give each token the label of the next one, which the loss shifts once more."""
    return replace(each, labels=np.append(each.labels[1:], IGNORED))


def lost_answer(each: Encoded) -> Encoded:
    """Leave the first answer out of the labels."""
    labels = each.labels.copy()
    (targets,) = np.nonzero(labels != IGNORED)
    breaks = np.flatnonzero(np.diff(targets) > 1)
    labels[targets[: breaks[0] + 1 if len(breaks) else None]] = IGNORED
    return replace(each, labels=labels)


def learnt_prompt(each: Encoded) -> Encoded:
    """Label the three tokens before the first answer, too."""
    labels = each.labels.copy()
    first = int(np.flatnonzero(labels != IGNORED)[0])
    labels[first - 3 : first] = each.input_ids[first - 3 : first]
    return replace(each, labels=labels)


def second_beginning(each: Encoded) -> Encoded:
    """Begin each sample with its first token twice."""
    return replace(
        each,
        input_ids=np.append(each.input_ids[:1], each.input_ids),
        labels=np.append(IGNORED, each.labels),
        positions=np.arange(len(each.input_ids) + 1)[None],
    )


def lost_end(each: Encoded) -> Encoded:
    """Leave the last two tokens of each answer out of the labels, of which one may be white space."""
    targets = each.labels != IGNORED
    kept = targets & np.append(targets[1:], False) & np.append(targets[2:], [False, False])
    return replace(each, labels=np.where(kept, each.labels, IGNORED))


def lost_first(each: Encoded) -> Encoded:
    """Leave the first token of each answer out of the labels."""
    targets = each.labels != IGNORED
    return replace(each, labels=np.where(targets & np.append(False, targets[:-1]), each.labels, IGNORED))


INPUT_FAULTS: Mapping[str, Callable[[Encoded], Encoded]] = {
    "labels shifted by one": shifted_labels,
    "an answer left out of the labels": lost_answer,
    "tokens of the prompt learnt": learnt_prompt,
    "a second beginning": second_beginning,
    "the end of answers not learnt": lost_end,
    "the beginning of answers not learnt": lost_first,
}


class ChangedEncoder:
    """An encoder with a fault in what it makes."""

    def __init__(self, encoder: Encoder, change: Callable[[Encoded], Encoded]) -> None:
        self._encoder, self._change = encoder, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def encode(self, sample: Sample, *, pixels: bool, kept: bytes = b"") -> Encoded:
        return self._change(self._encoder.encode(sample, pixels=pixels, kept=kept))


def wrong_labels() -> AbstractContextManager[Any]:
    """Shift the labels that the encoder of each rank makes."""
    load = encoders.load_encoder
    return patch.object(session, "load_encoder", lambda *arguments: ChangedEncoder(load(*arguments), shifted_labels))


# --- updates ------------------------------------------------------------------------------------------------------


@contextmanager
def _built(**changes: float) -> Iterator[None]:
    """Change all groups of the optimizer that a stage gets."""
    build = optimizer.build_optimizer

    def changed(*arguments: Any) -> torch.optim.AdamW:
        found = build(*arguments)
        for group in found.param_groups:
            group.update(changes)
        return found

    with patch.object(base, "build_optimizer", changed):
        yield


@contextmanager
def _updating(
    before: Callable[[Any], None] | None = None, after: Callable[[Any], None] | None = None
) -> Iterator[None]:
    """Do something before or after each update of AdamW that the engine makes, not the reference."""
    build = optimizer.build_optimizer

    def build_changed(*arguments: Any) -> torch.optim.AdamW:
        found = build(*arguments)

        class Changed(torch.optim.AdamW):
            def step(self, *rest: Any, **how: Any) -> Any:
                if before:
                    before(self)
                result = super().step(*rest, **how)
                if after:
                    after(self)
                return result

        found.__class__ = Changed
        return found

    with patch.object(base, "build_optimizer", build_changed):
        yield


def decayed_norms() -> AbstractContextManager[Any]:
    """Give norms and biases weight decay."""
    return _built(weight_decay=0.01)


def no_decay() -> AbstractContextManager[Any]:
    """Give nothing weight decay."""
    return _built(weight_decay=0.0)


def hidden_decay() -> AbstractContextManager[Any]:
    """Lose the weight decay in the update alone: the groups say that they have it."""

    def without(found: Any) -> None:
        for group in found.param_groups:
            group["said"], group["weight_decay"] = group["weight_decay"], 0.0

    def again(found: Any) -> None:
        for group in found.param_groups:
            group["weight_decay"] = group["said"]

    return _updating(without, again)


def late_schedule() -> AbstractContextManager[Any]:
    """Give each step the learning rate of the one before."""
    factor = schedule.Schedule.factor
    return patch.object(schedule.Schedule, "factor", lambda self, step: factor(self, max(1, step - 1)))


def no_warmup() -> AbstractContextManager[Any]:
    """Ignore the warm-up."""
    of = schedule.schedule_of
    return patch.object(training, "schedule_of", lambda *arguments: replace(of(*arguments), warmup=0))


def unset_rates() -> AbstractContextManager[Any]:
    """Compute the schedule, and never set the learning rates by it."""
    return patch.object(base, "scale_learning_rates", lambda *_: None)


def reset_momentum() -> AbstractContextManager[Any]:
    """Forget the first moment before each update."""

    def forget(found: Any) -> None:
        for state in found.state.values():
            state["exp_avg"].zero_()

    return _updating(forget)


def reset_variance() -> AbstractContextManager[Any]:
    """Forget the second moment before each update."""

    def forget(found: Any) -> None:
        for state in found.state.values():
            state["exp_avg_sq"].zero_()

    return _updating(forget)


def other_epsilon() -> AbstractContextManager[Any]:
    """Add 1e-6 in place of 1e-8 to the denominator of AdamW."""
    return _built(eps=1e-6)


def summed_gradients() -> AbstractContextManager[Any]:
    """Add the gradients of data ranks up, and do not divide."""
    average = FlatGradients.average
    return patch.object(FlatGradients, "average", lambda gradients, ranks: average(gradients, 1))


def clipped_first() -> AbstractContextManager[Any]:
    """Clip the gradients of each data rank before they are averaged."""
    average = FlatGradients.average

    def clipped(gradients: FlatGradients, ranks: int) -> None:
        gradients.clip(0.1)
        average(gradients, ranks)

    return patch.object(FlatGradients, "average", clipped)


def stale_weight() -> AbstractContextManager[Any]:
    """Undo the second update of one weight of each stage: that of the first step is nothing in a warm-up."""

    def undo(found: Any) -> None:
        weights = [each for group in found.param_groups for each in group["params"] if each.dim() > 1]
        held = found.state[weights[0]]
        if int(held["step"]) == 2:
            weights[0].data.add_(held["exp_avg"].sign(), alpha=found.param_groups[0]["lr"])

    return _updating(after=undo)


def kept_gradients() -> AbstractContextManager[Any]:
    """Keep the gradients of each step for the next one."""

    def added(found: Any) -> None:
        for group in found.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.grad.add_(getattr(each, "kept", torch.zeros_like(each.grad)))
                    each.kept = each.grad.clone()

    return _updating(added)


def updated_frozen_part() -> AbstractContextManager[Any]:
    """Move a weight of a part that is frozen with each update."""
    step = EngineBase.scale_learning_rates

    def moved(self: Any, factor: float) -> None:
        step(self, factor)
        frozen = next((each for each in self.stage.model.parameters() if not each.requires_grad), None)
        if frozen is not None:
            frozen.data.add_(1e-4)

    return patch.object(EngineBase, "scale_learning_rates", moved)


def trained_frozen_part() -> AbstractContextManager[Any]:
    """Train the part that the job freezes."""
    choose = trained.choose_trained
    return patch.object(
        session,
        "choose_trained",
        lambda skeleton, training: choose(skeleton, training.model_copy(update={"freeze": ()})),
    )


def untrained_part() -> AbstractContextManager[Any]:
    """Freeze a part that the job trains."""
    choose = trained.choose_trained
    return patch.object(
        session,
        "choose_trained",
        lambda skeleton, training: choose(skeleton, training.model_copy(update={"freeze": ("projector",)})),
    )


def untied_copies() -> AbstractContextManager[Any]:
    """Leave the gradients of both copies of a tied weight apart."""
    return patch.object(engine._Pipeline, "get_tied_weights_and_groups", lambda _: [])


def dropout_on() -> AbstractContextManager[Any]:
    """Set the dropout of attention to a tenth in every layer."""
    build = session.build_stage

    def built(*arguments: Any, **how: Any) -> StageModule:
        stage = build(*arguments, **how)
        for module in stage.model.modules():
            if hasattr(module, "attention_dropout"):
                vars(module)["attention_dropout"] = 0.1
        return stage

    return patch.object(session, "build_stage", built)


RATE_FAULTS: Mapping[str, Fault] = {
    "none": nullcontext,
    "weight decay of norms and biases": decayed_norms,
    "no weight decay": no_decay,
    "weight decay lost in the update": hidden_decay,
    "schedule off by one step": late_schedule,
    "warm-up ignored": no_warmup,
    "learning rates not set": unset_rates,
}
UPDATE_FAULTS: Mapping[str, Fault] = {
    "momentum reset": reset_momentum,
    "second moment reset": reset_variance,
    "another epsilon": other_epsilon,
    "a stale weight": stale_weight,
    "gradients kept": kept_gradients,
    "a part not trained": untrained_part,
    "copies of a tied weight apart": untied_copies,
    "dropout on": dropout_on,
    "labels shifted": wrong_labels,
}
"""These and those above with a pipeline of two stages, a weight tied across them, a warm-up, and no ZeRO."""
DATA_FAULTS: Mapping[str, Fault] = {
    "none": nullcontext,
    "gradients summed": summed_gradients,
    "clipped before the average": clipped_first,
    "a frozen part updated": updated_frozen_part,
    "a frozen part trained": trained_frozen_part,
}
"""With two data ranks, clipping, and a frozen vision tower."""


FAULTS: Mapping[str, Fault] = {
    **RATE_FAULTS, **UPDATE_FAULTS, **SAVING_FAULTS, **DATA_FAULTS, **KEY_FAULTS, **ADAPTER_FAULTS, **STAGE_FAULTS,
}  # fmt: skip


def serve_with_planted_faults(folder: Path) -> list[str]:
    """Serve the request in each subfolder with the fault that it is named after; return those that were not served."""
    failed = []
    for name in sorted(each.name for each in folder.iterdir() if each.name in FAULTS):
        with FAULTS[name]():
            if not serve(FolderChannel(folder / name)):
                failed.append(name)
    return failed
