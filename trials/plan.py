"""Plans: packing, layout, split and recomputation as one immutable value."""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from trials import wire
from trials.errors import InvalidPlan
from trials.grid import Grid
from trials.stage import TOWERS, Stage, Tower
from trials.units import number_of

OMNIBAL_PACKER = "isf"
"""Packer of OmniBal's recipe, and of HBP's levels."""
SIMPLE_PACKER = "best-fit"
"""Packer of packs that hold one long sample, where any packer does."""
MOST_UNITS = (1 << 31) - 1
"""Largest capacity of a pack, which stands for no limit: sizes of packs are 32-bit integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """Unpacked micro-batches: each sample is padded to the longest of its micro-batch."""

    samples: int
    """Samples in a micro-batch."""
    kind: Literal["padded"] = "padded"

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise InvalidPlan(f"a padded micro-batch needs at least 1 sample, not {self.samples}")

    @property
    def degrees(self) -> tuple[int, ...]:
        """Sequence degree of each level: no ranks share a micro-batch."""
        return (1,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Samples joined into one sequence with block-diagonal attention (OmniBal, balanced dynamic mini-batches)."""

    qv: int
    """Most vision units of a pack."""
    qt: int
    """Most text tokens of a pack, image tokens included."""
    qv_min: int
    """A pack with this many vision units is full enough (Q'v), unless it holds none."""
    qt_min: int
    """A pack with this many text tokens is full enough (Q't)."""
    packer: str = OMNIBAL_PACKER
    """Module of `trials.data.packers` that fills the packs."""
    sequence: int = 1
    """Sequence degree: neighbouring data ranks that compute a pack together (DeepSpeed-Ulysses)."""
    kind: Literal["packed"] = "packed"

    def __post_init__(self) -> None:
        if max(self.qv, self.qt) > MOST_UNITS:
            raise InvalidPlan(f"qv={self.qv} qt={self.qt} are more than any pack can hold; give less than 2^31")
        if not (0 <= self.qv_min <= self.qv and 0 <= self.qt_min <= self.qt and self.qt > 0):
            raise InvalidPlan(
                f"packing needs 0 <= qv_min <= qv and 0 <= qt_min <= qt with qt > 0, not "
                f"qv={self.qv} qv_min={self.qv_min} qt={self.qt} qt_min={self.qt_min}"
            )
        if self.sequence < 1:
            raise InvalidPlan(f"packs need a sequence degree of at least 1, not {self.sequence}")

    @property
    def levels(self) -> tuple["Packed", ...]:
        """These packs as the only level."""
        return (self,)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Sequence degree of each level."""
        return (self.sequence,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Levelled:
    """Packs of several levels, each for longer samples than the level before it (HBP, Hierarchical Balance Packing).

    A sample belongs to the first level that holds it. Packs of a level are filled up with samples of those before.
    """

    levels: tuple[Packed, ...]
    whole_steps: bool = False
    """Whether each step has rows of one level, as in HBP, and not of all levels in proportion to the epoch."""
    kind: Literal["levelled"] = "levelled"

    def __post_init__(self) -> None:
        if len(self.levels) < 2:
            raise InvalidPlan(
                f"a levelled packing needs at least 2 levels, not {len(self.levels)}; give that of one level alone"
            )
        for number, (one, other) in enumerate(pairwise(self.levels), start=1):
            if other.qv < one.qv or other.qt < one.qt or (other.qv, other.qt) == (one.qv, one.qt):
                raise InvalidPlan(
                    f"level {number + 1} with qv={other.qv} qt={other.qt} must hold longer samples than level {number} "
                    f"with qv={one.qv} qt={one.qt}; raise one of its capacities, and lower none"
                )

    @property
    def degrees(self) -> tuple[int, ...]:
        """Sequence degree of each level."""
        return tuple(level.sequence for level in self.levels)


ZeroStage: TypeAlias = Literal[0, 1, 2, 3]
Offload: TypeAlias = Literal["none", "vision", "language", "both"]

_ALWAYS = frozenset({"kind", "packer", "recompute_vision", "recompute_language"})
"""Fields of the first version of plans that have a default: an id covers them even at their default."""

Packing: TypeAlias = Annotated[Padded | Packed | Levelled, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of parallelism; the ranks are pipeline x data x tensor."""

    pipeline: int
    data: int
    zero: ZeroStage
    """ZeRO stage of the data-parallel group."""
    tensor: int = 1
    """Ranks that hold the matrices of a language layer together, each some rows or columns (Megatron-LM)."""
    reduce_within: int = 1
    """Neighbouring data ranks, those of a node, that average gradients first; their groups then do. 1: all at once."""
    offload: Offload = "none"
    """Kinds of layers that offload what they keep to the host where other plans recompute it."""
    bucket_bytes: int = 0
    """Least bytes of gradients that are averaged at once during the last backward pass; 0: all of them after it."""
    zero_bubble: bool = False
    """Whether stages defer weight gradients to where they would wait: ZB-H1 (Qi et al. 2023) in place of 1F1B."""

    def __post_init__(self) -> None:
        if min(self.pipeline, self.data, self.tensor) < 1:
            raise InvalidPlan(
                f"a layout needs degrees of at least 1, not {self.pipeline} x {self.data} x {self.tensor}"
            )
        if self.pipeline > 1 and self.zero > 1:
            raise InvalidPlan(f"ZeRO {self.zero} does not work with a pipeline; use ZeRO 0 or 1, or pipeline 1")
        if self.tensor > 1 and self.zero > 1:
            raise InvalidPlan(
                f"ZeRO {self.zero} does not work with tensor degree {self.tensor}; use ZeRO 0 or 1, or tensor 1"
            )
        if self.zero == 3 and self.offload != "none":
            raise InvalidPlan(
                f"ZeRO {self.zero} gathers weights inside of a layer and does not work with offload {self.offload}; "
                "use ZeRO 2, or offload none"
            )
        if self.reduce_within != 1:
            self._check_groups()
        if self.bucket_bytes and not self.can_overlap:
            raise InvalidPlan(
                "gradients are averaged during the last backward pass with pipeline 1, tensor 1, several data ranks, "
                "ZeRO 0 or 1 and reduce_within 1; leave bucket_bytes out"
            )
        if self.zero_bubble and (self.pipeline == 1 or self.tensor > 1):
            raise InvalidPlan(
                "one stage waits for no other, so that deferred weight gradients fill no bubble; leave zero_bubble out"
                if self.pipeline == 1
                else f"{self.tensor} tensor ranks gather the inputs of a block once for all its weight gradients, in "
                "its backward pass, and cannot defer these; use tensor 1, or leave zero_bubble out"
            )
        if self.bucket_bytes < 0:
            raise InvalidPlan(f"a bucket of {self.bucket_bytes} bytes of gradients is impossible; use 0 or more")

    def _check_groups(self) -> None:
        """Raise InvalidPlan unless data ranks can average gradients in these groups first."""
        if self.zero > 1:
            raise InvalidPlan(
                f"ZeRO {self.zero} averages gradients over all data ranks at once; use ZeRO 0 or 1, or reduce_within 1"
            )
        if self.reduce_within < 1 or self.reduce_within >= self.data or self.data % self.reduce_within:
            divisors = [str(each) for each in range(1, self.data) if self.data % each == 0]
            raise InvalidPlan(
                f"reduce_within {self.reduce_within} does not divide {self.data} data ranks into several groups; use "
                f"{' or '.join(divisors) or 1}"
            )

    @property
    def whole_copies(self) -> bool:
        """Whether each rank has a whole copy of the model, and all ranks at once average all gradients."""
        return self.pipeline == self.tensor == self.reduce_within == 1 and self.zero < 2

    @property
    def can_overlap(self) -> bool:
        """Whether data ranks can average gradients during a backward pass."""
        return self.whole_copies and self.data > 1

    @property
    def grid(self) -> Grid:
        """The ranks and their coordinates."""
        return Grid(pipeline=self.pipeline, data=self.data, tensor=self.tensor)

    @property
    def world_size(self) -> int:
        return self.grid.world_size

    def offloads(self, tower: Tower) -> bool:
        """Return whether layers of this kind offload what they keep, where they do not keep it."""
        return self.offload in (tower, "both")

    @property
    def shards_gradients(self) -> bool:
        """Whether data ranks hold gradients in shards (ZeRO 2 and 3), and so reduce them in each backward pass."""
        return self.zero >= 2 and self.data > 1

    @property
    def shards_weights(self) -> bool:
        """Whether data ranks hold weights in shards (ZeRO 3), and so gather them in each pass."""
        return self.zero == 3 and self.data > 1


class _Remembered:
    """Room for the hash and the id, which take long for a plan of many stages."""

    __slots__ = ("_hash", "_id")
    _hash: int
    _id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(_Remembered):
    """All that is tuned. With a job it determines a training.

    The vision embedding belongs to the first stage, the projector with the text embedding to the stage of the last
    vision layer (what it sends is smaller than what it receives), and the head with the loss to the last stage. Where
    no stage has a vision layer, the text embedding belongs to the first stage.
    """

    packing: Packing
    layout: Layout
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if len(self.stages) != self.layout.pipeline:
            raise InvalidPlan(
                f"the plan describes {number_of(len(self.stages), 'stage')} but pipeline is {self.layout.pipeline}"
            )
        levels = len(self.packing.degrees)
        for number, stage in enumerate(self.stages):
            if (given := 1 + len(stage.further_levels)) != levels:
                raise InvalidPlan(
                    f"stage {number} recomputes layers for {number_of(given, 'level')} of packs but the packing has "
                    f"{levels}; give its further_levels {number_of(levels - 1, 'entry', 'entries')}"
                )
        self._check_selective()
        self._check_deferred()
        seen_language = False
        for number, stage in enumerate(self.stages):
            if stage.vision and seen_language:
                raise InvalidPlan(f"stage {number} holds vision layers after a stage with language layers")
            seen_language = seen_language or stage.language > 0
        for degree in self.packing.degrees:
            if self.layout.data % degree:
                divisors = [str(each) for each in range(1, self.layout.data + 1) if self.layout.data % each == 0]
                raise InvalidPlan(
                    f"sequence degree {degree} needs groups of {degree} data ranks, but {self.layout.data} data ranks "
                    f"leave {self.layout.data % degree} over; use a degree of {' or '.join(divisors)}, or data "
                    f"{-(-self.layout.data // degree) * degree}"
                )

    def _check_selective(self) -> None:
        """Raise InvalidPlan where the layout does not allow the selective recomputation of a stage."""
        levels = [level for stage in self.stages for level in stage.recomputed]
        for tower in TOWERS:
            if (self.layout.zero == 3 or self.layout.offloads(tower)) and any(each.selective(tower) for each in levels):
                why, other = ("ZeRO 3", "ZeRO 2") if self.layout.zero == 3 else ("offload", "offload none")
                raise InvalidPlan(f"{why} takes away what selective recomputation needs; use {other}, or selective 0")

    def _check_deferred(self) -> None:
        """Raise InvalidPlan where the layout does not let a stage defer packs, or keep weights, as the stage says."""
        for number, stage in enumerate(self.stages):
            if (given := stage.most_deferred) is not None and not (self.layout.zero_bubble and 0 <= given < number):
                raise InvalidPlan(
                    f"most_deferred {given} lowers nothing on stage {number} of this layout; leave it out"
                )
            if stage.gathered_once and not self.layout.shards_weights:
                raise InvalidPlan(
                    f"gathered_once {stage.gathered_once} needs weights in shards, and only ZeRO 3 with several data "
                    "ranks has them; leave it out"
                )
        if self.layout.zero_bubble and not any(self.most_deferred):
            raise InvalidPlan("zero_bubble defers nothing with most_deferred 0 in each stage; leave both out")

    @property
    def most_deferred(self) -> tuple[int, ...]:
        """Most packs whose weight gradients wait on each stage; 0: they are computed in its backward passes."""
        each = ((number, stage.most_deferred) for number, stage in enumerate(self.stages))
        return tuple(self.layout.zero_bubble * (number if most is None else most) for number, most in each)

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", hash((self.packing, self.layout, self.stages)))
            return self._hash

    @property
    def document(self) -> str:
        """Canonical JSON of the plan, as it is stored: equal plans have equal documents, in every version."""
        return wire.canonical(self, always=_ALWAYS)

    @property
    def id(self) -> str:
        """The first 16 hexadecimal digits of the plan's SHA-256: equal plans have equal ids, everywhere."""
        try:
            return self._id
        except AttributeError:
            object.__setattr__(self, "_id", wire.digest(self, always=_ALWAYS))
            return self._id

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Stage boundaries: layers of the chain up to the end of each stage."""
        return tuple(accumulate(stage.vision + stage.language for stage in self.stages))


def packing_document(packing: Packing) -> str:
    """Return the canonical JSON of a packing as it is in a plan's: the same in every version."""
    return wire.canonical(packing, always=_ALWAYS)
