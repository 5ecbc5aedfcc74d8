"""Samplings, which choose samples of a file: `all`, `first:N`, `end:N` or `random:N`, N a count or a percentage."""

import math

PATTERN = r"^(all|(first|end|random):([1-9]\d{0,11}|(100|[1-9]\d?(\.\d+)?|0\.\d*[1-9]\d*)%))$"
"""Regular expression of a sampling; the names are those of LLaVA's YAML mixtures."""


def taken(sampling: str, rows: int) -> tuple[slice, float]:
    """Return the range of a file's `rows` samples that can be shown, and the share of it that an epoch shows.

    A percentage is rounded up to whole samples. A larger count than `rows` takes all of them.
    """
    strategy, _, amount = sampling.partition(":")
    if strategy == "all":
        return slice(0, rows), 1.0
    wanted = math.ceil(rows * float(amount[:-1]) / 100) if amount.endswith("%") else int(amount)
    count = min(wanted, rows)
    if strategy == "random":
        return slice(0, rows), count / rows if rows else 1.0
    return (slice(0, count) if strategy == "first" else slice(rows - count, rows)), 1.0
