"""The figures of docs/imbalances.md show what the code computes now."""

import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import figures

PAGE = figures.IMAGES.parent / "imbalances.md"
MOST_BYTES = 60_000


def leaves(value: Any) -> Iterator[Any]:
    """Yield the keys and values inside a JSON value, in order."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


def drawn(svg: Path) -> tuple[list[Any], list[str]]:
    """(the numbers that a figure was drawn from, the texts in it)."""
    root = ET.parse(svg).getroot()
    source = root.findtext("{http://www.w3.org/2000/svg}desc")
    assert source
    return [*leaves(json.loads(source))], [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_is_what_the_code_draws_now(name: str, tmp_path: Path) -> None:
    committed = figures.IMAGES / f"imbalance-{name}.svg"
    figures.draw(name, tmp_path / "now.svg")
    numbers, texts = drawn(committed)
    now, texts_now = drawn(tmp_path / "now.svg")
    assert [each for each in numbers if isinstance(each, str)] == [each for each in now if isinstance(each, str)]
    assert [each for each in numbers if not isinstance(each, str)] == pytest.approx(
        [each for each in now if not isinstance(each, str)], rel=1e-3, abs=0.2
    )
    assert texts == texts_now
    assert committed.stat().st_size < MOST_BYTES


def test_the_page_names_the_figures_values() -> None:
    text = PAGE.read_text()
    data, model, memory = map(figures.numbers, figures.FIGURES)
    equal, balanced = model.values()
    all_recomputed, needed = list(memory["plans"].values())[1:]
    assert f"packs need {data['packs']['step']:.0%}".replace("%", " %") in text
    for side in (equal, balanced):
        assert f"{side['idle']:.0%}".replace("%", " %") in text
    for side in (all_recomputed, needed):
        assert f"{side['milliseconds'] / 1000:.2f} s" in text
    assert needed["recomputed"] == [11, 0, 0, 0]
    assert f"with {needed['recomputed'][0]} layers of stage 0" in text
    assert balanced["split"][0] == "24v+5l"
