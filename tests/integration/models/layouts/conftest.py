"""Ranks and models that several layouts are compared on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.values.training import variant_of
from trials.run.pool import WarmPool


@pytest.fixture(scope="module")
def tied(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with few layers, and an output projection that is the word embedding."""

    def change(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True

    return variant_of(shallow, tmp_path_factory.mktemp("tied"), change)


@pytest.fixture(scope="module")
def pools(pool: WarmPool, four_ranks: WarmPool) -> Mapping[int, WarmPool]:
    """Ranks by their number."""
    return {2: pool, 4: four_ranks}
