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
    import vl_convert  # noqa: PLC0415 - an extra, and slow to load

    config = json.loads((_TEMPLATE / "config.json").read_bytes())
    styled = {**spec, "config": {**config, "background": PAPER, "aria": False, **spec.get("config", {})}}
    light = dict(re.findall(r"--(\w+): (#\w+)", (_TEMPLATE / "page.css").read_text().partition("@media")[0]))
    svg = vl_convert.vegalite_to_svg(re.sub(r"var\(--(\w+)\)", lambda name: light[name[1]], json.dumps(styled)))
    with whole(path) as partial:
        if path.suffix == ".svg":
            partial.write_text(svg, encoding="utf-8")
        elif path.suffix == ".pdf":
            partial.write_bytes(vl_convert.svg_to_pdf(svg))
        else:
            partial.write_bytes(vl_convert.svg_to_png(svg, ppi=_DOTS_PER_INCH))
