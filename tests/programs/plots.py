"""The texts of plots, as matplotlib draws them."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from unittest.mock import patch

from matplotlib.text import Text
from matplotlib.transforms import Bbox


@contextmanager
def drawn_texts() -> Iterator[dict[Text, Bbox]]:
    """Note the texts that are drawn inside, with the boxes that they take in pixels."""
    found: dict[Text, Bbox] = {}
    draw = Text.draw

    def noted(text: Text, renderer: object) -> None:
        draw(text, renderer)  # type: ignore[arg-type]
        if text.get_visible() and text.get_text().strip():
            found[text] = text.get_window_extent()

    with patch.object(Text, "draw", noted):
        yield found


def overlaps(texts: dict[Text, Bbox]) -> list[tuple[str, str]]:
    """Return the pairs of texts that cover each other by a pixel or more."""
    return [
        (one.get_text(), other.get_text())
        for (one, box), (other, of_other) in combinations(texts.items(), 2)
        if min(box.x1, of_other.x1) - max(box.x0, of_other.x0) >= 1
        and min(box.y1, of_other.y1) - max(box.y0, of_other.y0) >= 1
    ]
