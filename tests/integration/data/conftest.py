"""A file of lengths."""

from pathlib import Path

import numpy as np
import pytest

from tests.values.data import write_lengths


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    rows = zip(random.integers(1, 6, 300).tolist(), random.integers(50, 1500, 300).tolist(), strict=True)
    return write_lengths(tmp_path / "lengths.json", list(rows))
