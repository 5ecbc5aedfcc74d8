"""Charts as files: drawn by Vega-Lite, with the style and the colours of a report on white paper."""

import json
import re
from pathlib import Path

from autotune.output_file import check_library, check_output_file, whole
from autotune.report.charts.chart import PAPER, Spec

_TEMPLATE = Path(__file__).parent / "template"
_KINDS = (".svg", ".png", ".pdf")
_DOTS_PER_INCH = 200


def check_picture(path: Path) -> None:
    """Check, before any work is done, that `write_picture` can draw into this file. Raise PackError."""
    check_output_file(path, _KINDS)
    check_library("a plot", "vl_convert", "vl-convert-python")


def write_picture(path: Path, spec: Spec) -> None:
    """Draw into a file of the kind that its suffix names. Raise PackError where it cannot be written."""
    drawn = picture(spec, path.suffix)
    with whole(path) as partial:
        partial.write_bytes(drawn)


def picture(spec: Spec, kind: str) -> bytes:
    """Return the picture as an .svg, .png or .pdf file."""
    import vl_convert  # noqa: PLC0415 - an extra, and slow to load

    config = json.loads((_TEMPLATE / "config.json").read_bytes())
    whole_spec = {**spec, "config": {**config, "background": PAPER, "aria": False, **spec.get("config", {})}}
    light = dict(re.findall(r"--(\w+): (#\w+)", (_TEMPLATE / "page.css").read_text().partition("@media")[0]))
    text = re.sub(r"var\(--(\w+)\)", lambda name: light[name[1]], json.dumps(whole_spec))
    svg: str = vl_convert.vegalite_to_svg(text)
    if kind == ".svg":
        return svg.encode()
    drawn: bytes = vl_convert.svg_to_pdf(svg) if kind == ".pdf" else vl_convert.svg_to_png(svg, ppi=_DOTS_PER_INCH)
    return drawn
