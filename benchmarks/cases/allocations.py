"""Memory that a computation allocates, as torch's profiler sees it."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


def allocations(run: Callable[[], object]) -> list[int]:
    """Return the bytes of each allocation in the order of time; those that were freed are negative."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        seen.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return [int(event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"]
