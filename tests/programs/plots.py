"""The texts of pictures, with the places that they take."""

import cmath
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

from PIL import ImageFont

_SVG = "{http://www.w3.org/2000/svg}"
_ABOVE, _BELOW = 0.72, 0.2
"""Of the base line, as shares of the size of the font."""

Box = tuple[str, complex, complex]
"""A text, with its least and its greatest corner in pixels."""


def drawn_texts(svg: Path) -> list[Box]:
    """Return the visible texts of a picture, line by line."""
    return list(_inside(ET.parse(svg).getroot(), 0j, 1 + 0j))


def _inside(element: ET.Element, origin: complex, direction: complex) -> Iterator[Box]:
    for kind, values in re.findall(r"(\w+)\(([^)]*)\)", element.get("transform", "")):
        numbers = [float(value) for value in values.split(",")]
        if kind == "translate":
            origin += direction * complex(*numbers)
        else:
            assert kind == "rotate"
            direction *= cmath.exp(1j * math.radians(numbers[0]))
    if element.tag == f"{_SVG}text" and element.get("opacity") != "0":
        size = float(element.get("font-size", "").removesuffix("px"))
        before = {"start": 0, "middle": 0.5, "end": 1}[element.get("text-anchor", "start")]
        below = 0.0
        for line in element.findall(f"{_SVG}tspan") or [element]:
            below += float(line.get("dy", 0))
            text = line.text or ""
            width = ImageFont.load_default(size).getlength(text)
            left = complex(-before * width, below)
            right = left + complex(width, _BELOW * size)
            corners = [origin + direction * place for place in (left - 1j * _ABOVE * size, right)]
            horizontal, vertical = zip(*((corner.real, corner.imag) for corner in corners), strict=True)
            yield text, complex(min(horizontal), min(vertical)), complex(max(horizontal), max(vertical))
    for inner in element:
        yield from _inside(inner, origin, direction)


def overlaps(texts: list[Box]) -> list[tuple[str, str]]:
    """Return the pairs of texts that cover each other by a pixel or more."""
    return [
        (one, other)
        for (one, least, most), (other, of_least, of_most) in combinations(texts, 2)
        if min(most.real, of_most.real) - max(least.real, of_least.real) >= 1
        and min(most.imag, of_most.imag) - max(least.imag, of_least.imag) >= 1
    ]
