"""Traits of samples in which the steps of a training have to be like random ones: lengths, images, targets, sources."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trials.arrays import Floats, Ints
from trials.data.index import DatasetIndex

# A choice: the time of dealing grows with the square of the traits.
_SOURCES = 32
"""Maximum number of sources that are compared. The largest are compared alone, and all others as one source."""
# A choice: logarithms as whole numbers add up to the same on every machine, to 0.1 % of a length.
_PARTS = 1 << 10
"""Parts into which the unit of a logarithm is divided."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traits:
    """What samples are compared by, as columns [samples, traits] without a constant one."""

    names: tuple[str, ...]
    values: Ints

    @classmethod
    def of(cls, index: DatasetIndex, shown: Ints) -> "Traits":
        """Return the traits of the `shown` rows of an index, [shown, traits]."""
        units = index.vision_units[shown]
        columns = {
            "length": _logarithm(index.text_tokens[shown]),
            "vision units": units.astype(np.int64),
            "images": (units > 0).astype(np.int64),
            "targets": _logarithm(index.target_tokens[shown]),
        }
        file, samples = index.file[shown], np.bincount(index.file[shown], minlength=len(index.files))
        largest = np.argsort(-samples, kind="stable")
        for number in largest[: _SOURCES - 1].tolist():
            name = f"source {index.files[number].path.name}"
            # Files in different folders often have one name.
            columns[f"{name} ({number + 1})" if name in columns else name] = (file == number).astype(np.int64)
        if len(largest) >= _SOURCES:
            columns["other sources"] = np.isin(file, largest[_SOURCES - 1 :]).astype(np.int64)
        different = {name: column for name, column in columns.items() if len(column) and np.ptp(column)}
        values = np.stack([*different.values()], axis=1) if different else np.empty((len(shown), 0), dtype=np.int64)
        return cls(names=tuple(different), values=values)

    def deviations(self, starts: Ints) -> Floats:
        """Return the sums over packs of the samples' deviations from the mean, in standard deviations, [packs, traits].

        Pack i has the samples `starts[i]` to `starts[i + 1]`.
        """
        count, sizes = len(self.values), np.diff(starts)
        before = np.concatenate([np.zeros_like(self.values[:1]), np.cumsum(self.values, axis=0)])
        sums = before[starts[1:]] - before[starts[:-1]]
        # Sums of whole numbers do not depend on their order, so all ranks find the same variance.
        totals = [int(total) for total in before[-1]]
        squares = [int((column**2).sum()) for column in self.values.T]
        means = np.array([total / count for total in totals])
        variances = [(count * square - total**2) / count**2 for square, total in zip(squares, totals, strict=True)]
        deviations: Floats = (sums - sizes[:, None] * means) / np.sqrt(np.array(variances))
        return deviations


def sums_of_steps(values: Ints | Floats, degrees: Ints, steps: Ints) -> Floats:
    """Return the sums of the `values` of packs [packs, ...] over `steps` [steps, packs], [steps, ...].

    A pack has an entry for each of the ranks that share it, `degrees` of them, but counts once.
    """
    # In whole parts, so that sums of whole numbers are exact.
    every = int(np.lcm.reduce(np.unique(degrees)))
    parts = (every // degrees).reshape(-1, *(1,) * (values.ndim - 1))
    sums: Floats = (values * parts)[steps].sum(axis=1) / every
    return sums


def variance_ratios(deviations: Floats, samples: Floats) -> Floats:
    """Return the variance between steps over that of steps in random order, [traits].

    `deviations` of steps [steps, traits] are those of `Traits.deviations`. The ratio is the mean square between groups
    over that of all samples (one-way analysis of variance; Scheffe, The Analysis of Variance, 3.1): 1 is expected
    of random order, whatever the numbers of samples. It is 0 for a single step.
    """
    squares: Floats = (deviations**2 / np.maximum(samples, 1)[:, None]).sum(axis=0) / max(len(samples) - 1, 1)
    return squares if len(samples) > 1 else np.zeros_like(squares)


def _logarithm(values: NDArray[np.integer]) -> Ints:
    """Return the binary logarithm of 1 + values in parts of its unit, on a line between powers of two: to 9 %.

    A library's logarithm may be rounded otherwise on another machine, and all ranks have to find the same steps.
    """
    mantissas, exponents = np.frexp(values.astype(np.float64) + 1)
    logarithms: Ints = ((exponents - 2 + 2 * mantissas) * _PARTS).astype(np.int64)
    return logarithms
