"""Parameters of tests, of which `make test` takes a few and `make test-long` all."""

from collections.abc import Collection, Mapping
from typing import Any

import pytest
from hypothesis import settings


def examples(number: int) -> int:
    """Return the most examples of a property of which `make test-long` tries this number."""
    return max(1, number * settings().max_examples // 100)


def parameters(values: Mapping[str, Any], *, short: Collection[str]) -> list[Any]:
    """Return the values as parameters with their names as ids; those not in `short` get the marker `long`.

    A tuple holds the values of several arguments.
    """
    unknown = set(short) - values.keys()
    assert not unknown, f"no parameters of these names: {unknown}"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), id=name, marks=() if name in short else pytest.mark.long
        )
        for name, value in values.items()
    ]
