"""Batch samplers that yield the packs of a plan, in the optimizer steps of `launch`."""

import logging
from collections.abc import Iterator, Mapping, Sized
from copy import copy
from dataclasses import dataclass
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from torch.utils.data import Sampler

from autotune.data_problems import warn_of_skipped
from autotune.errors import PackError, PredictError
from autotune.loop.same_data import check_same_data, check_same_packs
from autotune.loop.samples import SampleDataset
from autotune.plan_file import read_plan
from trials import wire
from trials.data.epoch import Epoch, EpochSettings, build_epoch
from trials.data.steps.arrangement import ARRANGEMENT_VERSION
from trials.plan import Levelled, Packed, Packing, Padded, Plan, packing_document
from trials.units import number_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackStep:
    """One optimizer step, with totals over all data ranks."""

    number: int
    """Within its epoch, counted from 0."""
    packs: int
    """Packs of each rank."""
    samples: int
    target_tokens: int
    """The loss of a step is the sum over its targets, divided by this number."""


class _OneRank(Sampler[list[int]]):
    """Packs of one rank, which must not be distributed once more."""

    @property
    def batch_size(self) -> NoReturn:
        """Raise PackError: libraries ask for it before they give each rank a part of the batches, or cut these."""
        raise PackError(
            "packs have no batch size, and a sampler has those of one rank alone: do not let accelerate prepare its "
            "loader, nor another library distribute it over the ranks"
        )


class PackSampler(_OneRank):
    """The packs of one data rank, as lists of sample numbers: a `batch_sampler` of PyTorch's `DataLoader`.

    Equal arguments and data give equal packs, on every rank and after every restart. With the data degree of the plan,
    the steps are those of `launch`. Call `set_epoch` before each epoch. A pack is empty where there are fewer packs
    than ranks. An iteration raises PackError where another rank of torch.distributed iterates over other steps, or over
    the packs of this rank.
    """

    def __init__(
        self,
        samples: SampleDataset,
        plan: Plan | Packing | str | PathLike[str],
        *,
        rank: int = 0,
        ranks: int = 1,
        dataset: Sized | None = None,
    ) -> None:
        """Take the packing of `plan` alone, which may be the path of a plan file; `ranks` data ranks share each step.

        `dataset` is the dataset to draw from if it is not `samples`; each of its items is one record of the data, those
        that are not trained on included, and packs have the numbers of these.
        Raise PackError for a dataset of another length, a rank that does not exist, shared packs, a curriculum and, as
        `set_epoch` does too, where another rank of torch.distributed has read other data.
        Rank 0 logs a warning where steps are not as near to the global batch as `launch` keeps them, and where samples
        are left out by `data.oversize: skip`.
        """
        super().__init__()
        if not isinstance(samples, SampleDataset):
            raise PackError(f"samples must be a SampleDataset, not {type(samples).__name__}; make one from the job")
        # `bool` is a subclass of `int`: True would be taken for 1.
        if isinstance(ranks, bool) or not isinstance(ranks, int) or not isinstance(rank, int) or not 0 <= rank < ranks:
            raise PackError(f"rank {rank!r} of {ranks!r} does not exist; ranks are counted from 0")
        packing = _packing(plan)
        if (degree := max(packing.degrees)) > 1:
            raise PackError(
                f"the packs of the plan are shared by {degree} ranks, which only `launch` can do; set its sequence to "
                "1 for a loop of your own"
            )
        own = None if dataset is samples else dataset
        if own is not None and len(own) != samples.records:
            raise PackError(
                f"the dataset has {len(own)} items but the data of the job {samples.records} records; make both of "
                "the same files"
            )
        if samples.job.training.curriculum.steps:
            raise PackError(
                "training.curriculum is followed by `launch` alone; remove it from the job for a loop of your own"
            )
        self._samples = samples
        self._numbers = np.arange(len(samples), dtype=np.int64) if own is None else samples.index.record
        """Number of each row of the index in the dataset that is drawn from."""
        self._packing = packing
        self._rank, self._ranks = rank, ranks
        self._first_step = 0
        # A look at a batch before the loop does not use up a state, nor does a loop that sets its epoch twice.
        self._is_loaded = self._is_begun = False
        # Ranks that share no steps may have data of their own.
        self._is_compared = ranks == 1 or check_same_data(samples)
        self._epoch = self._built(0)
        self.epoch = 0
        """Number of the epoch, counted from 0."""
        if rank == 0:
            name = f"plan {plan.id}" if isinstance(plan, Plan) else "the packing"
            warn_of_skipped(samples.index, packing, samples.job.data.oversize, name)
            self._warn_of_other_batch()

    def set_epoch(self, epoch: int, first_step: int | None = None) -> None:
        """Yield the packs of this epoch from now on, from step `first_step` on.

        By default these are all. Until packs of an epoch are yielded, a further call for it keeps the first step, such
        as that of a loaded state.

        Raise PackError for an epoch or a step that does not exist, and without `first_step` for an earlier epoch than
        the one that was set, if no pack of that one was yielded.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise PackError(f"epoch must be a whole number of at least 0, not {epoch!r}")
        self._is_compared = self._is_compared or check_same_data(self._samples)
        built = self._epoch if epoch == self.epoch else self._built(epoch)
        if first_step is None:
            is_waiting = self._is_loaded or not self._is_begun
            if is_waiting and epoch < self.epoch:
                # The loop would count the targets of other packs.
                raise PackError(
                    f"epoch {epoch} is set after epoch {self.epoch}, of which no pack was yielded; if the loop goes "
                    f"back, give the first step too, set_epoch({epoch}, 0), and do not let accelerate prepare the "
                    "loader, which then sets epochs itself"
                )
            first_step = self._first_step if is_waiting and epoch == self.epoch else 0
        if not 0 <= first_step <= built.steps:
            raise PackError(f"epoch {epoch} has {number_of(built.steps, 'step')}, so none begins after {first_step}")
        self._epoch, self.epoch, self._first_step = built, epoch, first_step
        self._is_loaded = self._is_begun = False

    @property
    def steps(self) -> tuple[PackStep, ...]:
        """The steps that an iteration yields, in order."""
        return tuple(self._step(self._epoch, number) for number in range(self._first_step, self._epoch.steps))

    def __len__(self) -> int:
        """Return the number of packs that an iteration yields."""
        return sum(len(self._epoch.rows(number)) for number in range(self._first_step, self._epoch.steps))

    def __iter__(self) -> Iterator[list[int]]:
        # Bound here, since another iteration may set another epoch before this one ends.
        epoch, first = self._epoch, self._first_step
        check_same_packs(
            self._identity(), rank=self._rank, ranks=self._ranks, epoch=self.epoch, first_step=self._first_step
        )
        self._is_begun = True
        for number in range(first, epoch.steps):
            yield from self._packs(epoch, number)

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the state after step `step` of this epoch, as values that JSON can hold.

        The step is asked for because loading processes are ahead of the training. Raise PackError for a step that this
        epoch does not have.
        """
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < self._epoch.steps:
            raise PackError(
                f"epoch {self.epoch} has no step {step!r}, only {number_of(self._epoch.steps, 'step')}, counted from "
                "0; give the `number` of the PackStep that is done"
            )
        return {**self._identity(), "epoch": self.epoch, "steps": step + 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the step of a state. Raise PackError for a state of other data or of another packing."""
        if not isinstance(state, Mapping):
            raise PackError(f"a state is what `state_dict` returned, not {type(state).__name__}")
        changed = [name for name, value in self._identity().items() if state.get(name) != value]
        if changed:
            was = ", ".join(f"{name} was {state.get(name)!r} and is {self._identity()[name]!r}" for name in changed)
            raise PackError(f"the state is not of these packs: {was}; restore what changed, or start a new training")
        self.set_epoch(state["epoch"], state["steps"])
        self._is_loaded = True

    def _identity(self) -> dict[str, Any]:
        """Return the values that decide the packs, such as the seed and the packing."""
        training = self._samples.job.training
        return {
            "data": self._samples.index.steps_digest,
            "packing": packing_document(self._packing),
            "ranks": self._ranks,
            "seed": training.seed,
            "global_batch_samples": training.global_batch_samples,
            "batch_tolerance": training.batch_tolerance,
            "step_variance": training.step_variance,
            "arrangement_version": ARRANGEMENT_VERSION,
            "oversize": self._samples.job.data.oversize,
            # Packs are matched by cost, so other weights make other steps.
            "weights": wire.to_document(self._samples.weights),
        }

    def _built(self, number: int) -> Epoch:
        samples = self._samples
        settings = EpochSettings.of_job(samples.job, samples.weights)
        return build_epoch(samples.index, self._packing, settings, data_parallel=self._ranks, number=number)

    def _warn_of_other_batch(self) -> None:
        """Log where steps have more or fewer samples than the job's tolerance allows; the other epochs are similar."""
        if not self._epoch.keeps_batch:
            _log.warning(
                "a step of %s has %.0f samples on average, but training.global_batch_samples is %d: all ranks take the "
                "same number of whole packs; take a plan with smaller packs, or another number of ranks",
                number_of(self._ranks, "rank"),
                self._epoch.batch_samples,
                self._samples.job.training.global_batch_samples,
            )

    def _step(self, epoch: Epoch, number: int) -> PackStep:
        step = epoch.step(number)
        packs = len(step.packs[self._rank])
        return PackStep(number=number, packs=packs, samples=step.samples, target_tokens=step.target_tokens)

    def _packs(self, epoch: Epoch, number: int) -> Iterator[list[int]]:
        """Yield the packs of this rank in one step, as numbers of samples."""
        for rows in epoch.step(number).packs[self._rank]:
            yield self._numbers[rows].tolist()


def _packing(plan: Plan | Packing | str | PathLike[str]) -> Packing:
    """Return the packing of a plan, or of a plan file. Raise PackError for anything else."""
    if isinstance(plan, str | PathLike):
        try:
            plan = read_plan(Path(plan))
        except PredictError as error:
            raise PackError(str(error)) from error
    packing = plan.packing if isinstance(plan, Plan) else plan
    if not isinstance(packing, Packed | Padded | Levelled):
        raise PackError(
            f"plan must be a Plan, its packing or a plan file, not {type(plan).__name__}; such as best_plan(job).plan"
        )
    return packing


class EvenPackSampler(_OneRank):
    """The packs of several epochs in one pass, with the same number of packs in every step: empty ones are added.

    For programs that accumulate a fixed number of batches and expect epochs of equal length, such as the `Trainer` of
    transformers, while a step of a plan may have fewer packs than another. Empty packs add nothing to a loss.
    """

    micro_batches: int
    """Packs of each step."""
    steps: tuple[PackStep, ...]
    """All steps, without the packs that were added."""

    def __init__(self, sampler: PackSampler, epochs: int) -> None:
        """Pack each of the `epochs` once, to count its steps.

        Raise PackError, as an iteration does, for a sampler that goes on from a state.
        """
        super().__init__()
        if not isinstance(sampler, PackSampler):
            raise PackError(f"sampler must be a PackSampler, not {type(sampler).__name__}")
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise PackError(f"epochs must be a whole number of at least 1, not {epochs!r}")
        self._sampler, self._epochs = sampler, epochs
        self.steps = tuple(step for each in self._each_epoch() for step in each.steps)
        self.micro_batches = max(step.packs for step in self.steps)

    def __len__(self) -> int:
        """Return the number of packs, with the empty ones that give all steps equally many."""
        return len(self.steps) * self.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        for each in self._each_epoch():
            packs = iter(each)
            for step in each.steps:
                yield from islice(packs, step.packs)
                yield from ([] for _ in range(self.micro_batches - step.packs))

    def _each_epoch(self) -> Iterator[PackSampler]:
        # A copy, which no other iteration sets to its epoch.
        sampler = copy(self._sampler)
        if sampler._first_step:
            raise PackError(
                f"the sampler continues after {number_of(sampler._first_step, 'step')} of epoch {sampler.epoch}, but "
                "an EvenPackSampler begins with epoch 0; make it of a new sampler, and skip `micro_batches` packs for "
                "each step that is done"
            )
        for epoch in range(self._epochs):
            sampler.set_epoch(epoch, 0)
            yield sampler
