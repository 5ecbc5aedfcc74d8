"""Packing capacities to try: pairs (qv, qt) that the samples of the data fill well."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trials.arrays import Ints
from trials.data.packers.best_fit import Sizes, patterns
from trials.plan import OMNIBAL_PACKER, Packed
from trials.workload import DataProfile, Workload

# A choice, in factors of 1.2 to 1.5: each is compared with every layout.
_PACKED_SAMPLES = (1.5, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Mean samples per pack for which capacities are proposed."""
_NEIGHBOURHOOD = (0.65, 1.35)
"""Range around the mean units of a pack in which the qv is searched that the data fills best."""
# Choices: the histogram is packed for each, 5 to 10 ms with at most 256 sizes.
_LOOKED_AT = 16
"""Values of qv that are compared in this range."""
_NEARLY = 0.01
"""Difference in filling up to which capacities are equally good; the one nearest the mean is taken."""
_SIZES, _PARTS = 256, 128
"""Most sizes of samples that are packed as they are, and the number of groups that stand for more. 128 groups are
packed in a third of the time of 256, with about the same capacities."""
_QUANTILES = (0.5, 0.75, 0.9)
"""Quantiles of the tokens of packs that are full of units, for a qt that binds as well."""
_WORTH_NAMING = 0.1
"""Least share of packs that are full of units for which it is the reason; with fewer it is how full packs are."""
# A choice: below 1 % of usual capacities, so finer steps would fill packs no better.
_TOKEN_STEP = 16
OMNIBAL_SLACK = 128
"""Q't = Qt - 128 (OmniBal, balanced dynamic mini-batches)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """A pair of capacities to try."""

    qv: int
    qt: int
    reason: str
    """What fills the packs, in words."""


def holds_all(workload: Workload) -> bool:
    """Return whether every pack must hold the longest sample: no plan may win by training on fewer samples."""
    return workload.oversize in ("skip", "fail")


def capacities(data: DataProfile, most_samples: float, *, hold_all: bool) -> tuple[Capacity, ...]:
    """Return pairs whose packs hold from 1.5 to `most_samples` mean samples, at least 1, by ascending qt.

    For each number of samples there are three: the qv that sums of the data's vision units fill best, with a qt that
    never binds and with one that binds as well, and the mean tokens as a qt that binds alone. OmniBal's rule adds one.
    With `hold_all` each pair holds the longest sample: for jobs that would lose a sample above the capacities, or fail
    on it.
    """
    lattice = _Lattice(data)
    found = [pair for count in _counts(most_samples) for pair in lattice.pairs(count)]
    qt = up_to_step(data.longest_text_tokens)
    # OmniBal, section on data.
    qv = max(1, round(qt * data.vision_units / data.text_tokens))
    rule = "OmniBal's rule: the longest sample, at the data's tokens per vision unit"
    found.append(Capacity(qv=qv, qt=qt, reason=rule))
    least = _longest(data) if hold_all else (1, 1)
    unique: dict[tuple[int, int], Capacity] = {}
    for pair in found:  # the first reason of equal pairs is kept
        qv, qt = max(pair.qv, least[0]), max(pair.qt, least[1])
        reason = pair.reason if (qv, qt) == (pair.qv, pair.qt) else "raised to hold the longest sample"
        unique.setdefault((qv, qt), Capacity(qv=qv, qt=qt, reason=reason))
    return tuple(sorted(unique.values(), key=lambda pair: (pair.qt, pair.qv)))


def lengths(data: DataProfile, most_samples: float, *, hold_all: bool) -> tuple[int, ...]:
    """Return the tokens of as many mean samples as `capacities` has, ascending, for packs that these alone limit."""
    least = data.longest_text_tokens if hold_all else 1
    mean = data.text_tokens / data.samples
    return tuple(sorted({up_to_step(max(count * mean, least)) for count in _counts(most_samples)}))


def omnibal_capacities(data: DataProfile, samples_per_pack: int, *, hold_all: bool) -> tuple[Packed, ...]:
    """Return OmniBal's candidates: qt = k qv, k the mean tokens per vision unit, for this many samples or one more.

    Q'v = Qv and Q't = Qt - 128 (OmniBal, balanced dynamic mini-batches). `hold_all` as for `capacities`.
    """
    units, tokens = data.vision_units / data.samples, data.text_tokens / data.samples
    least = max(1, round(samples_per_pack * units))
    most = max(least, round((samples_per_pack + 1) * units))
    ray = [(qv, up_to_step(tokens * (qv / units if units else samples_per_pack))) for qv in range(least, most + 1)]
    longest = _longest(data) if hold_all else (0, 0)
    return tuple(_packed(max(qv, longest[0]), max(qt, longest[1])) for qv, qt in ray)


def capacity_of(data: DataProfile, tokens: int) -> tuple[int, int]:
    """Return (qv, qt) of packs of `tokens` tokens: units at the data's ratio, at least those of a sample."""
    most = max((units for units, length, _ in data.histogram if length <= tokens), default=0)
    most = data.most_vision_units if tokens == data.longest_text_tokens else most
    return max(1, most, round(tokens * data.vision_units / data.text_tokens)), tokens


class _Lattice:
    """The sums that the samples' units and tokens can make, by packing their histogram."""

    def __init__(self, data: DataProfile) -> None:
        self._units = data.vision_units / data.samples
        self._tokens = data.text_tokens / data.samples
        self._longest = data.longest_text_tokens
        self._sizes = _few(*np.array(data.histogram, dtype=np.int64).T)
        self._shown = _chosen(self._sizes, self._sizes.units > 0)
        """Samples with images."""
        self._images = Sizes.of(self._shown.units, np.zeros_like(self._shown.units), self._shown.counts)
        """The samples with images, without their text."""

    def pairs(self, samples: float) -> Iterator[Capacity]:
        """Yield capacities for packs of about this many mean samples."""
        mean_tokens = up_to_step(samples * self._tokens)
        if not self._units:
            yield Capacity(qv=1, qt=mean_tokens, reason=f"text alone, {samples:g} samples on average")
            return
        centre, share = samples * self._units, np.linspace(*_NEIGHBOURHOOD, _LOOKED_AT)
        around = np.unique(np.maximum(np.rint(centre * share), 1).astype(int)).tolist()
        # Where no qt binds, text only chooses among samples of equal units.
        shares = [_Fill.of(self._images, qv, 1).units_share for qv in around]
        nearly = (qv for qv, share in zip(around, shares, strict=True) if share >= max(shares) - _NEARLY)
        best = self._fill_of_images(min(nearly, key=lambda qv: abs(qv - centre)))
        full_share = float(best.packs @ (best.units == best.qv)) / max(int(best.packs.sum()), 1)
        if full_share >= _WORTH_NAMING:
            yield best.capacity(f"images fill {full_share:.0%} of packs, most often {best.most_often}")
        else:
            yield best.capacity(f"images fill {best.units_share:.0%} of Qv")
        tighter = (self._fill(best.qv, up_to_step(best.token_quantile(quantile))) for quantile in _QUANTILES)
        both = max(tighter, key=lambda fill: fill.units_share * fill.tokens_share)
        yield both.capacity(f"images and text fill {both.units_share:.0%} and {both.tokens_share:.0%} of the capacity")
        # Twice the mean units bind in hardly any pack.
        loose = max(best.qv, round(2 * centre))
        yield Capacity(qv=loose, qt=mean_tokens, reason=f"text fills, {samples:g} samples on average")

    def _fill_of_images(self, qv: int) -> "_Fill":
        """Return packs of samples with images alone; their qt is what the longest of them needs."""
        fill = _Fill.of(self._shown, qv, up_to_step((qv + 1) * self._longest))
        return replace(fill, qt=up_to_step(fill.token_quantile(1)))

    def _fill(self, qv: int, qt: int) -> "_Fill":
        return _Fill.of(self._sizes, qv, qt)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fill:
    """Contents of packs of some capacities, as columns over kinds of packs."""

    qv: int
    qt: int
    packs: Ints
    units: Ints
    tokens: Ints
    firsts: Ints
    """First entry of each kind in `contents`."""
    contents: Ints
    """Units of the samples of the packs, one kind after the other, [samples]."""

    @classmethod
    def of(cls, sizes: Sizes, qv: int, qt: int) -> "_Fill":
        """Pack the sizes that fit."""
        sizes = _chosen(sizes, (sizes.units <= qv) & (sizes.tokens <= qt))
        found = patterns(sizes, Packed(qv=qv, qt=qt, qv_min=qv, qt_min=0))
        held = np.array([size for pattern in found for size in pattern.sizes], dtype=np.int64)
        firsts = np.cumsum([0, *(len(pattern.sizes) for pattern in found)])[:-1]
        columns = (sizes.units[held], sizes.tokens[held])
        units, tokens = (np.add.reduceat(column, firsts) if found else column for column in columns)
        packs = np.array([pattern.packs for pattern in found], dtype=np.int64)
        return cls(qv=qv, qt=qt, packs=packs, units=units, tokens=tokens, firsts=firsts, contents=columns[0])

    @property
    def most_often(self) -> str:
        """The units of the samples of the commonest packs that are full of units: `5+5+5`."""
        sums: Counter[str] = Counter()
        kinds = zip(np.split(self.contents, self.firsts[1:]), self.packs.tolist(), self.units == self.qv, strict=False)
        for contents, packs, is_full in kinds:
            sums["+".join(map(str, filter(None, sorted(contents.tolist(), reverse=True))))] += packs * int(is_full)
        common = sums.most_common(1)
        return common[0][0] if common else "none"

    @property
    def units_share(self) -> float:
        """Share of the vision units that all packs can hold."""
        return float(self.packs @ self.units) / max(self.qv * int(self.packs.sum()), 1)

    @property
    def tokens_share(self) -> float:
        """Share of the text tokens that all packs can hold."""
        return float(self.packs @ self.tokens) / max(self.qt * int(self.packs.sum()), 1)

    def token_quantile(self, share: float) -> int:
        """Return the quantile of the packs' tokens; 1 when there is no pack."""
        order = np.argsort(self.tokens, kind="stable")
        reached = np.cumsum(self.packs[order]) >= share * self.packs.sum()
        return int(self.tokens[order][reached][0]) if len(order) else 1

    def capacity(self, reason: str) -> Capacity:
        return Capacity(qv=self.qv, qt=self.qt, reason=reason)


def _few(units: Ints, tokens: Ints, counts: Ints) -> Sizes:
    """Return the histogram with few enough sizes to be packed in milliseconds; tokens are rounded up.

    More than `_SIZES` are sorted by units and tokens and divided into `_PARTS` groups with as many samples each; the
    middle sample stands for its group. Rounding further would make samples look larger than they are.
    """
    sizes = Sizes.of(units, -(-tokens // _TOKEN_STEP) * _TOKEN_STEP, counts)
    if len(sizes.counts) <= _SIZES:
        return sizes
    order = np.lexsort((sizes.tokens, sizes.units))
    ends = np.cumsum(sizes.counts[order])
    bounds: Ints = np.linspace(0, ends[-1], _PARTS + 1).astype(np.int64)
    middle = order[np.searchsorted(ends, (bounds[:-1] + bounds[1:]) / 2)]
    return Sizes.of(sizes.units[middle], sizes.tokens[middle], bounds[1:] - bounds[:-1])


def _chosen(sizes: Sizes, which: NDArray[np.bool_]) -> Sizes:
    return Sizes(units=sizes.units[which], tokens=sizes.tokens[which], counts=sizes.counts[which])


def _packed(qv: int, qt: int) -> Packed:
    return Packed(qv=qv, qt=qt, qv_min=qv, qt_min=max(0, qt - OMNIBAL_SLACK), packer=OMNIBAL_PACKER)


def _longest(data: DataProfile) -> tuple[int, int]:
    """Return the least (qv, qt) that every sample fits."""
    return data.most_vision_units, up_to_step(data.longest_text_tokens)


def _counts(most_samples: float) -> Sequence[float]:
    return [count for count in _PACKED_SAMPLES if count <= most_samples] or [1]


def up_to_step(tokens: float) -> int:
    return max(1, math.ceil(tokens / _TOKEN_STEP)) * _TOKEN_STEP
