"""Trainers to which plans are exported. One module each, found by name; `autotune.draft.trainers` reads them."""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from autotune.draft.adapters import PARTS_BY_NAME
from autotune.draft.leftovers import learning_text
from autotune.draft.shell_script import NoValue
from autotune.draft.trainers import Trainer
from autotune.exporting.settings import common_settings
from autotune.search.space.abilities import Abilities
from trials import plugins
from trials.data.records.sample import Kind
from trials.job import PARTS, Job
from trials.units import number_of
from trials.workload import Part

if TYPE_CHECKING:  # these import torch or numpy, which the check of a trainer's name does without
    from autotune.exporting.closest import HeldPlan
    from autotune.exporting.counting.counted import Counted
    from trials.data.epoch import Epoch
    from trials.data.index import DatasetIndex
    from trials.model.inputs.video_limits import VideoLimits

_OF_MEDIA = re.compile("pixels|fps|frames|maxlen|dynamic_patch")
"""Arguments on the size of images and videos, which decide on lengths."""
ROOM = 64
"""Tokens by which the longest sample may be longer in a trainer that would cut it or leave it out."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Export:
    """All that the files of a trainer are made of."""

    job: Job
    epoch: "Epoch"
    """First epoch under the plan that the trainer holds."""
    held: "HeldPlan"
    nodes: int
    """Machines over which the ranks are spread, with as many on each."""
    family: str
    """`model_type` of the model's configuration."""
    folder: Path
    """Absolute path that the files will have."""
    cuts_at: int | None
    """Number of tokens at which the job cuts samples; None where it does not."""
    held_out: "DatasetIndex | None"
    """Samples to evaluate on, each as often as an evaluation shows it."""
    present: Mapping[str, Any]
    """Arguments of the user's own configuration, by the trainer's names; empty where none is given."""
    left_variables: tuple[str, ...]
    """Variables that the user's own script gives the trainer, and that the exported files do not hold."""
    videos: "VideoLimits | None"
    """What decides on the frames of videos; None where no sample has one."""
    python: Path | None
    """Python of the environment in which the trainer is installed; None where it is this one, if any."""

    @property
    def devices(self) -> int:
        return self.held.plan.layout.data

    @property
    def of_node(self) -> int:
        """Ranks on each node."""
        return self.devices // self.nodes

    @property
    def steps(self) -> int:
        """Steps of all epochs, of which each has those of the first."""
        return self.job.training.epochs * self.epoch.steps

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the job by common names, without a number of steps that all epochs together do not make.

        transformers' Trainer goes on until it has made them, and begins further epochs for that.
        """
        found = common_settings(self.job)
        return {name: value for name, value in found.items() if name != "max_steps" or value < self.steps}

    @property
    def cut_length(self) -> int:
        """Tokens at which a trainer is to cut samples: where the job cuts them, or else more than any sample has.

        Trainers may take two frames of a video more, by which one with tokens for as many grows to twice its length.
        """
        if self.cuts_at is not None:
            return self.cuts_at
        indexes = [self.epoch.index] if self.held_out is None else [self.epoch.index, self.held_out]
        longest = max(int(index.text_tokens.max()) for index in indexes)
        return (2 if self.videos else 1) * longest + ROOM

    @property
    def filmed(self) -> str:
        """How many of the samples have videos, in words."""
        filmed = int((self.epoch.index.kind & Kind.VIDEO > 0).sum())
        return f"{filmed} of {number_of(len(self.epoch.index), 'sample')}"

    @property
    def output(self) -> Path:
        """Folder of the trainer's checkpoints: not the job's, where it would take those of autotune for its own."""
        return self.folder / "output"

    @property
    def recomputes(self) -> tuple[bool, bool]:
        """Whether (vision, language) layers are recomputed; without vision layers, both as the language model."""
        (stage,) = self.held.plan.stages
        language = bool(stage.recompute_language)
        return (bool(stage.recompute_vision) if stage.vision else language, language)


class Exporter(Protocol):
    """What a module of this package offers."""

    TITLE: str
    """Name of the trainer, for messages."""
    READER: Trainer
    """The module that reads its configuration."""
    NAMES: Mapping[str, str]
    """Common name of an argument by the trainer's own, where they differ."""
    ARGUMENTS: tuple[str, ...]
    """Arguments whose values are those of settings of a job, by the trainer's own names."""
    DROPPED: tuple[str, ...]
    """Further arguments of a present configuration that would change data, packs, steps or what is trained."""
    REMEDY: str
    """What to do where the trainer counts other tokens."""
    VARIABLES: Set[str]
    """Variables of a script that it reads and that its files hold as `ENV`; empty where they hold none."""
    STARTS_IN: str | None
    """Folder of the trainer's repository in which the command starts; None for the exported folder."""

    def check(self, job: Job, family: str) -> None:
        """Raise ExportError where the trainer cannot train models of this `model_type` as the job says."""

    def abilities(self, job: Job) -> Abilities:
        """Return the limits within which plans are solved for a job that `check` does not refuse."""

    def decided(self, export: Export) -> dict[str, Any]:
        """Return the arguments that the export decides; those of a present configuration come besides them."""

    def write(self, export: Export, folder: Path) -> None:
        """Write all files into an empty folder. Raise ExportError for a sample that the trainer cannot hold."""

    def count(self, export: Export, rows: Sequence[int], folder: Path) -> "Counted":
        """Count the tokens that the trainer makes of some samples, as few as they are; `folder` takes files of them.

        By its own package, template and processor where it has one; else as near to it as can be, which `why_not` says.
        """

    def command(self, export: Export) -> str:
        """Return the command that starts the training, in `STARTS_IN`."""

    def left_out(self, export: Export) -> Iterator[str]:
        """Yield what of plan and job the files do not hold, and what the trainer does instead."""

    def notes(self, export: Export) -> Iterator[str]:
        """Yield what the user should know or do."""


EXPORTS: plugins.Plugins[Exporter] = plugins.Plugins(__name__)


def own_settings(common: Mapping[str, Any], names: Mapping[str, str], arguments: Iterable[str]) -> dict[str, Any]:
    """Return those of the common settings that are among the trainer's `arguments`, by its own names.

    `names` are the common names by the trainer's own where they differ, as `init --from` has them.
    """
    own = {names.get(argument, argument): argument for argument in arguments}
    return {own[name]: value for name, value in common.items() if name in own}


def kept_of(present: Mapping[str, Any], decided: Iterable[str], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of a present configuration that an export does not decide, under any of their names."""
    known = {names.get(name, name) for name in decided}
    return {name: value for name, value in present.items() if names.get(name, name) not in known}


def present_notes(exporter: Exporter, export: Export) -> Iterator[str]:
    """Yield what of a present configuration is not kept, and what is though the job has nothing for it."""
    present, names, decided = export.present, exporter.NAMES, exporter.decided(export)
    known = {names.get(name, name) for name in exporter.DROPPED}
    if dropped := sorted(name for name in present if names.get(name, name) in known):
        yield f"Not kept of the configuration, since the exported data and plan replace them: {', '.join(dropped)}"
    kept = kept_of(present, (*decided, *exporter.DROPPED, *exporter.ARGUMENTS), names)
    without = exporter.decided(replace(export, present={}))
    if taken := sorted(name for name, value in decided.items() if without.get(name) != value):
        yield (
            "Taken from the configuration, before values of the model folder and the usual ones; check that none "
            f"changes data or training: {', '.join(taken)}"
        )
    if replaced := [
        f"{name}: {present[name]} by {decided[name]}"
        for name in sorted(decided.keys() & present.keys())
        if _OF_MEDIA.search(name) and _differ(present[name], decided[name])
    ]:
        yield (
            "WARNING: replaced by values of the model folder, to which the lengths of the plan belong: "
            f"{', '.join(replaced)}; write those that are meant into the folder, and tune again"
        )
    started = exporter.command(export)
    if left := [name for name in export.left_variables if f"{name}=" not in started]:
        yield (
            "Not kept of the variables of the script; set those that are still needed where the command is started: "
            f"{', '.join(left)}"
        )
    if learning := learning_text(kept):
        yield f"Kept of the configuration, though the job has nothing for these, so the training differs: {learning}"
    if rest := sorted(name for name in kept if not learning_text({name: kept[name]})):
        yield f"Kept of the configuration as they are; check that none changes data or training: {', '.join(rest)}"


def _differ(one: object, other: object) -> bool:
    try:
        return float(str(one)) != float(str(other))
    except ValueError:
        return str(one) != str(other)


def unread_prompt(given: Mapping[str, Any]) -> str:
    """Return the note on arguments of a present configuration that decide on the prompt and are kept unread."""
    return (
        f"WARNING: {', '.join(f'{name}: {value}' for name, value in given.items())} of the configuration is kept "
        "unread; whether it makes the same text as the model's own chat template was not checked, and equal numbers of "
        "tokens do not show it: compare the text of a sample there with that of the model"
    )


def target_regex(parts: Iterable[Part], targets: Iterable[str]) -> str:
    """Return the pattern of the layers with these names, or ends of names, in these parts of a model."""
    names = {part: "|".join(name for name, its in PARTS_BY_NAME.items() if its == part) for part in PARTS}
    tower, projector = (rf".*\b({names[part]})\b" for part in ("vision", "projector"))
    # Mergers are inside of towers, and language models have no name of their own everywhere.
    ahead = {
        "vision": f"(?={tower})(?!{projector})",
        "projector": f"(?={projector})",
        "language": f"(?!{tower})(?!{projector})",
    }
    return rf"({'|'.join(ahead[part] for part in parts)})(.*\.)?({'|'.join(map(re.escape, targets))})"


def zero_configuration(stage: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration of a ZeRO stage, as transformers' Trainer completes it."""
    # Without it Trainer saves no weights that are in shards.
    whole = {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
    return {
        "zero_optimization": {"stage": stage, "overlap_comm": True, "contiguous_gradients": True, **whole},
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "gradient_accumulation_steps": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
    }


def starter(export: Export) -> str:
    """Return the variables by which a trainer starts its ranks, on each node."""
    nodes = f"NNODES={export.nodes} " if export.nodes > 1 else ""
    return f"{nodes}NPROC_PER_NODE={export.of_node}"


def node_notes(export: Export) -> Iterator[str]:
    """Yield how to start the ranks of several nodes."""
    if export.nodes > 1:
        yield (
            f"Start it on each of the {export.nodes} nodes, with NODE_RANK from 0 to {export.nodes - 1} and "
            "MASTER_ADDR, the address of the first node, in its environment; files need the same paths on all of them"
        )


def launch_script(export: Export, program: str, arguments: Mapping[str, Any], **environment: str) -> str:
    """Return a script that starts a program on a node; arguments that are not known are left out."""
    nodes = f'--nnodes {export.nodes} --node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR" ' * (export.nodes > 1)
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
    known = {name: value for name, value in arguments.items() if not isinstance(value, NoValue)}
    lines = (f"    --{name} {_words(value)}" for name, value in known.items())
    continued = " \\\n".join((f"torchrun {nodes}--nproc_per_node {export.of_node} {program}", *lines))
    return f"#!/bin/sh\nset -e\n{exports}{continued}\n"


def _words(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(_words, value))
    return shlex.quote(str(value))
