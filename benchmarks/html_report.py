"""Report of a large study: size, seconds to write, seconds until it is drawn. Prints one JSON object.

    python -m benchmarks.html_report [--trials 500] [--pictures FOLDER]

The study is synthetic: pipelines of 16 stages with four data ranks (`tests/values/report_studies.py`). The command is
started like a user starts it. It needs a Chromium of the system, and writes screenshots of the page to FOLDER.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.output.result import at_least, at_most, finish
from storage.store import open_store
from tests.programs.browser import CHROMIUM, LAPTOP, NEEDED, PHONE, chromium, opened
from tests.values.report_studies import large

MEGABYTES, WRITE_SECONDS, DRAW_SECONDS = 5.0, 5.0, 2.0
"""At most."""
_RUNS = 3
_MARKS = "[...document.querySelectorAll('.plot')].map(plot => plot.querySelectorAll('.role-mark path').length)"
_LOOKS: dict[str, dict[str, Any]] = {
    "laptop": LAPTOP,
    "laptop, dark": {**LAPTOP, "color_scheme": "dark"},
    "phone": PHONE,
}


def main() -> None:
    arguments = _arguments()
    if CHROMIUM is None:
        raise SystemExit(NEEDED)
    with tempfile.TemporaryDirectory() as folder:
        url, path = f"sqlite:///{folder}/study.db", Path(folder) / "report.html"
        with open_store(url) as store:
            large(store, arguments.trials)
        written = [_write(url, path) for _ in range(_RUNS)]
        megabytes = path.stat().st_size / 1e6
        drawn = _draw(path, arguments.pictures)
    rows = [{"trials": arguments.trials, "megabytes": megabytes, "written": written, "drawn": drawn}]
    finish(
        rows,
        [
            at_most("megabytes of the file", [megabytes], MEGABYTES),
            at_most("seconds to write it, fastest of three", [min(each["seconds"] for each in written)], WRITE_SECONDS),
            at_most("seconds until the last chart is drawn", [each["seconds"] for each in drawn], DRAW_SECONDS),
            at_least("marks of the emptiest chart", [each["least_marks"] for each in drawn], 1),
            at_most("messages and requests", [each["messages"] + each["requests"] - 1 for each in drawn], 0),
        ],
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--pictures", type=Path)
    return parser.parse_args()


def _write(url: str, path: Path) -> dict[str, float]:
    """Return the seconds of one run, those of its processors, and the cores that other programs used meanwhile."""
    before, begins = psutil.cpu_times(), time.perf_counter()
    command = [sys.executable, "-m", "autotune", "report", "--db", url, "--out", str(path), "-q"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        _, process.returncode, used = os.wait4(process.pid, 0)
    seconds, after = time.perf_counter() - begins, psutil.cpu_times()
    if process.returncode:
        raise SystemExit("the report could not be written")
    own = used.ru_utime + used.ru_stime
    busy = sum(getattr(after, name) - getattr(before, name) for name in ("user", "nice", "system"))
    return {"seconds": seconds, "cpu_seconds": own, "cores_of_others": max(0.0, busy - own) / seconds}


def _draw(path: Path, pictures: Path | None) -> list[dict[str, Any]]:
    rows = []
    with chromium() as browser:
        for name, look in _LOOKS.items():
            with opened(browser, path, **look) as found:
                marks = found.value(_MARKS)
                rows.append(
                    {
                        "look": name,
                        "seconds": found.value("Number(document.documentElement.dataset.drawn)") / 1e3,
                        "charts": len(marks),
                        "least_marks": min(marks),
                        "messages": len(found.said),
                        "requests": len(found.asked),
                    }
                )
                if pictures:
                    found.page.screenshot(path=pictures / f"{name.replace(', ', '-')}.png", full_page=True)
    return rows


if __name__ == "__main__":
    main()
