"""Draw the chart in the README from the recorded tuning of the example.

    python -m benchmarks.output.chart

The record is docs/benchmarks/tuning.json. Its `result` holds fields of what `autotune tune JOB --json` prints. The
drawing keeps the record as its description, where a test compares the two.
"""

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from autotune.report.charts.chart import COLOURS, INK, Spec, category, number
from autotune.report.picture import write_picture

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "benchmarks" / "tuning.json"
CHART = ROOT / "docs" / "images" / "tuning.svg"

NAMES = {"default": "Usual settings", "omnibal": "OmniBal's recipe", "packed": "Packed by hand"}
"""What baselines are called in the chart, from top to bottom."""
_BESIDE: Spec = {"type": "text", "align": "left", "fontSize": 12, "color": INK}


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw, as SVG, throughput with standard errors: the baselines, then the winner of the search."""
    result = record["result"]
    roles = {each["role"]: each for each in result["baselines"]}
    found = {**{name: roles[role] for role, name in NAMES.items()}, "autotune": result}
    rows = [_row(name, each) for name, each in found.items()]
    speed = number("speed", None, axis=None, scale={"domain": [0, 1.2 * max(row["speed"] for row in rows)]})
    least, most = ({**speed, "field": field} for field in ("least", "most"))
    colour = {"condition": {"test": "datum.name == 'autotune'", "value": COLOURS["after"]}, "value": "var(--faint)"}
    spec: Spec = {
        "title": f"Training throughput in samples/s, {record['machine']}",
        "data": {"values": rows},
        "width": 560,
        "height": 140,
        "encoding": {"y": category("name", order=list(found))},
        "layer": [
            {"mark": "bar", "encoding": {"x": speed, "color": colour}},
            {"mark": {"type": "rule", "color": INK}, "encoding": {"x": least, "x2": {"field": "most"}}},
            {"mark": {**_BESIDE, "x": 6}, "encoding": {"text": {"field": "gain"}}},
            {"mark": {**_BESIDE, "dx": 6}, "encoding": {"x": most, "text": {"field": "text"}}},
        ],
        "config": {"title": {"anchor": "start", "fontSize": 13, "fontWeight": "normal"}},
    }
    write_svg(path, spec, record)


def _row(name: str, found: dict[str, Any]) -> dict[str, Any]:
    speed, error = found["estimated_samples_per_second"], found["estimated_samples_per_second_error"]
    return {
        "name": name,
        "speed": speed,
        "least": speed - error,
        "most": speed + error,
        "text": f"{speed:.1f} +- {error:.1f}",
        "gain": f"autotune: {found['gain']:.2f} times" if "gain" in found else "",
    }


def write_svg(path: Path, spec: Spec, values: dict[str, Any]) -> None:
    """Draw an SVG that keeps the values that it shows as its description."""
    write_picture(path, spec)
    path.write_text(path.read_text().replace(">", f"><desc>{escape(json.dumps(values))}</desc>", 1))


if __name__ == "__main__":
    draw(json.loads(RECORD.read_text()), CHART)
