"""Contiguous parts of the chain that pipeline stages can hold, and which of them are alike."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.parts import LANGUAGE, VISION, Parts
from autotune.search.solver.rungs import Counts, Rungs
from autotune.search.solver.splits import Choices
from trials.arrays import Floats, Ints
from trials.costs.coefficients import KINDS
from trials.stage import Recomputed, Stage

_EMBEDDING, _PROJECTOR, _HEAD = (KINDS.index(kind) for kind in ("vision_embedding", "projector", "head"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CandidateStages:
    """Parts of the chain as stages of a pipeline, all [parts]."""

    numbers: Ints
    """Number of the stage of each, from 0."""
    vision: Ints
    language: Ints
    projects: NDArray[np.bool_]
    """Whether the part includes the projector."""
    stages: int
    """Stages of the pipeline."""
    rungs: Rungs = (1, 1)

    @classmethod
    def of(cls, numbers: Ints, starts: Ints, ends: Ints, vision_layers: int, stages: int) -> "CandidateStages":
        """Build the parts with layers starts[i] to ends[i] of the chain, in which vision layers come first."""
        vision = np.minimum(ends, vision_layers) - np.minimum(starts, vision_layers)
        # The projector is on the stage of the last vision layer; without vision layers, of the first language layer.
        projecting = max(vision_layers - 1, 0)
        return cls(
            numbers=numbers,
            vision=vision,
            language=ends - starts - vision,
            projects=(starts <= projecting) & (projecting < ends),
            stages=stages,
        )

    def with_rungs(self, rungs: Rungs) -> "CandidateStages":
        """Return the parts with these rungs of a layer of each kind."""
        return replace(self, rungs=rungs)

    @property
    def vision_rungs(self) -> Ints:
        """Rungs of the vision layers of each part: with all of them, each layer is recomputed as a whole."""
        return self.vision * self.rungs[0]

    @property
    def language_rungs(self) -> Ints:
        return self.language * self.rungs[1]

    def __len__(self) -> int:
        return len(self.vision)

    def __getitem__(self, rows: Ints) -> "CandidateStages":
        return CandidateStages(
            numbers=self.numbers[rows],
            vision=self.vision[rows],
            language=self.language[rows],
            projects=self.projects[rows],
            stages=self.stages,
            rungs=self.rungs,
        )

    def distinct(self) -> tuple["CandidateStages", Ints, Ints]:
        """Return (distinct parts, the row of each of them here, the distinct part of each row here).

        Many parts of a chain of equal layers are alike: only the stage and the numbers of layers of each kind count.
        """
        most = int(self.vision.max(initial=0)) + 1, int(self.language.max(initial=0)) + 1
        # One integer for each part: `np.unique` of integers is much faster than of rows.
        key = ((self.numbers * most[0] + self.vision) * most[1] + self.language) * 2 + self.projects
        _, first, which = np.unique(key, return_index=True, return_inverse=True)
        return self[first], first, which

    def parts(self, vision_rungs: Ints, language_rungs: Ints) -> Parts:
        """Return the parts with these rungs of their layers."""
        layers, recomputed, selective = np.zeros((3, len(self), len(KINDS)))
        layers[:, _EMBEDDING], layers[:, _HEAD] = self.numbers == 0, self.numbers == self.stages - 1
        layers[:, VISION], layers[:, _PROJECTOR], layers[:, LANGUAGE] = self.vision, self.projects, self.language
        for kind, count, of_kind, rungs in (
            (VISION, self.vision, vision_rungs, self.rungs[0]),
            (LANGUAGE, self.language, language_rungs, self.rungs[1]),
        ):
            recomputed[:, kind] = of_kind if rungs == 1 else np.maximum(of_kind - count, 0)
            selective[:, kind] = 0 if rungs == 1 else np.minimum(of_kind, count) - recomputed[:, kind]
        return Parts.of_layers(layers, recomputed, selective)

    def stage(self, row: int, of_levels: Counts) -> Stage:
        """Return one part as the stage of a plan, with these rungs for packs of each level."""
        vision, language = np.array(of_levels).T
        parts = self[np.full(len(of_levels), row)].parts(vision, language)
        counts = np.hstack([each[:, [VISION, LANGUAGE]] for each in (parts.recomputed, parts.selective)]).astype(int)
        levels = [
            Recomputed(vision=vision, language=language, selective_vision=of_vision, selective_language=of_language)
            for vision, language, of_vision, of_language in counts.tolist()
        ]
        return Stage(vision=int(self.vision[row]), language=int(self.language[row])).recomputing(levels)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cuts:
    """All parts of a chain that stages can hold when each holds a layer: a column [parts] for each stage."""

    starts: list[Ints]
    ends: list[Ints]
    which: list[Ints]
    """The one of `different` that each part is."""
    different: CandidateStages
    """The different ones of the parts, each once."""
    kept: Parts
    """`different` with nothing recomputed."""

    def choices(self, seconds: Floats) -> list[Choices]:
        """Return the choices of each stage, given the seconds of `different`."""
        return [
            Choices(starts=starts, ends=ends, seconds=seconds[which])
            for starts, ends, which in zip(self.starts, self.ends, self.which, strict=True)
        ]


@lru_cache(maxsize=64)
def cuts(layers: int, vision_layers: int, stages: int, rungs: Rungs) -> Cuts:
    """Return the parts for a chain of these layers; every packing asks for the same."""
    starts, ends = np.triu_indices(layers + 1, 1)
    number = np.arange(stages)[:, None]
    after = stages - 1 - number
    # The stages before and after have at least a layer each; the first begins the chain, and the last ends it.
    possible = (starts >= number) & (ends <= layers - after)
    possible &= (starts == 0) | (number > 0)
    possible &= (ends == layers) | (after > 0)
    numbers, rows = np.nonzero(possible)
    starts, ends = starts[rows], ends[rows]
    every = CandidateStages.of(numbers, starts, ends, vision_layers, stages).with_rungs(rungs)
    different, _, which = every.distinct()
    nothing = np.zeros_like(different.vision)
    edges = np.searchsorted(numbers, np.arange(1, stages))
    first, last, alike = (np.split(column, edges) for column in (starts, ends, which))
    kept = different.parts(nothing, nothing)
    return Cuts(starts=first, ends=last, which=alike, different=different, kept=kept)
