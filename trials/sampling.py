"""Samplings, which choose samples of a file: `all`, `first:N`, `end:N`, `random:N` or `exactly:N`.

N is a count, or with `first`, `end` and `random` a percentage.
"""

import math

PATTERN = r"^(all|exactly:[1-9]\d{0,11}|(first|end|random):([1-9]\d{0,11}|(100|[1-9]\d?(\.\d+)?|0\.\d*[1-9]\d*)%))$"
"""Regular expression of a sampling; the names but `exactly` are those of LLaVA's YAML mixtures."""
# A choice: larger numbers are a mistake, such as a count of samples, and an epoch would have as many of each.
MOST_REPEATS = 1000
"""Most times that an epoch shows a sample."""
# Far above the error of a product of floats, and far below a sample.
_FLOAT_ERROR = 1e-12


def rounded_up(share: float, rows: int) -> int:
    """Return `share` of `rows` samples, rounded up, without what the error of floats adds to a whole number."""
    return math.ceil(share * rows * (1 - _FLOAT_ERROR))


def taken(sampling: str, rows: int) -> tuple[slice, float]:
    """Return the range of a file's `rows` samples that can be shown, and the share of it that an epoch shows.

    `rows` is at least 1. A percentage is rounded up to whole samples. Of a larger count than `rows`, `exactly` shows
    samples several times, as LLaMA-Factory and ms-swift do it, and the others take all of them, as LLaVA does it.
    """
    strategy, _, amount = sampling.partition(":")
    if strategy == "all":
        return slice(0, rows), 1.0
    wanted = rounded_up(float(amount[:-1]) / 100, rows) if amount.endswith("%") else int(amount)
    count = min(wanted, rows)
    if strategy in ("random", "exactly"):
        shown = wanted if strategy == "exactly" else count
        return slice(0, rows), shown / rows
    return (slice(0, count) if strategy == "first" else slice(rows - count, rows)), 1.0
