"""Draw the chart in the README from the recorded tuning of the example.

    python -m benchmarks.chart

The record is docs/benchmarks/tuning.json. Its `result` holds fields of what `autotune tune JOB --json` prints. The
drawing keeps the record in its metadata, where a test compares the two.
"""

import json
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs" / "benchmarks" / "tuning.json"
CHART = ROOT / "docs" / "images" / "tuning.svg"

NAMES = {"default": "Usual settings", "omnibal": "OmniBal's recipe", "packed": "Packed by hand"}
"""What baselines are called in the chart, from top to bottom."""
_OTHERS, _OURS, _TEXT = "#b9c4cc", "#1f5f8b", "#333333"
# Without a fixed salt, matplotlib draws random ids, and every drawing would be a change in git.
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "svg.fonttype": "none",
    "svg.hashsalt": "autotune",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.bottom": False,
}


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw, as SVG, throughput with standard errors: the baselines, then the winner of the search."""
    result = record["result"]
    baselines = {each["role"]: each for each in result["baselines"]}
    rows = [(name, baselines[role], _OTHERS) for role, name in NAMES.items()]
    rows.append(("autotune", result, _OURS))
    widest = 1.2 * max(row["estimated_samples_per_second"] for _, row, _ in rows)
    with rc_context(_STYLE):
        figure = Figure(figsize=(7.2, 2.6), layout="constrained")
        axes = figure.subplots()
        for place, (_, row, color) in enumerate(rows):
            speed, error = row["estimated_samples_per_second"], row["estimated_samples_per_second_error"]
            axes.barh(place, speed, height=0.62, color=color, xerr=error, ecolor=_TEXT, capsize=3)
            gain = f"autotune: {row['gain']:.2f} times" if "gain" in row else ""
            axes.text(0.01 * widest, place, gain, va="center", color=_TEXT, fontsize=9)
            axes.text(speed + error + 0.01 * widest, place, f"{speed:.1f} +- {error:.1f}", va="center", color=_TEXT)
        axes.set(xlim=(0, widest), ylim=(len(rows) - 0.5, -0.5))
        axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
        axes.set_xticks([])
        axes.tick_params(axis="y", length=0)
        axes.set_title(f"Training throughput in samples/s, {record['machine']}", loc="left", fontsize=10)
        # No date: two drawings of one record are the same file.
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": json.dumps(record)})


if __name__ == "__main__":
    draw(json.loads(RECORD.read_text()), CHART)
