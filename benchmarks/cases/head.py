"""Time and memory of the head and the loss by the share of tokens with a label. Prints one JSON object.

    python -m benchmarks.cases.head [--tokens 1024] [--hidden 512] [--vocabulary 151936]

Each case is a process of its own on one core: forward and backward passes in float32. `all rows` computes the logits of
every token at once, as a plain loop does; the others are those of a training. Adding to the gradient of the whole
weight takes the same time for one target as for all: the line through the times of all shares has it as its fixed part.
Bytes are those that torch's profiler saw allocated at once, with a weight that needs no gradient: its own hides the
logits.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from benchmarks.output.result import at_most, finish, show
from trials.model.ends.head_loss import summed_loss, targets_of

SHARES = (0.05, 0.1, 0.2, 0.4)
PLAIN = "all rows"
_REPEATS = 7


def main() -> None:
    arguments = _arguments()
    rows = []
    for case in (PLAIN, *SHARES):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(_measured, (case, arguments.tokens, arguments.hidden, arguments.vocabulary)))
        show(rows[-1])
    plain, *others = rows
    targets = [row["targets"] for row in others]
    seconds, peaks = ([row[name] for row in others] for name in ("seconds", "peak_bytes"))
    line = np.polynomial.Polynomial.fit(targets, seconds, 1)
    per_target = [peak / count for peak, count in zip(peaks, targets, strict=True)]
    finish(
        rows,
        [
            at_most(
                "seconds, off from a line of the targets", np.abs(seconds / line(np.array(targets)) - 1).tolist(), 0.1
            ),
            at_most("seconds of no target, over those of all rows", [line(0) / plain["seconds"]], 0.1),
            at_most(
                "peak bytes of a target, off from those of the first share",
                [abs(each / per_target[0] - 1) for each in per_target],
                0.1,
            ),
        ]
        + [
            at_most(
                f"relative difference of the {name} from all rows'",
                [abs(row[f"{name} at {row['share']}"] / plain[f"{name} at {row['share']}"] - 1) for row in others],
                1e-6,
            )
            for name in ("loss", "gradient")
        ],
    )


def _measured(case: str | float, tokens: int, hidden: int, vocabulary: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    states = torch.randn(tokens, hidden, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(vocabulary, hidden) / hidden**0.5)
    weight.grad = torch.zeros_like(weight)
    labels = torch.randint(0, vocabulary, (tokens,))
    order = torch.randperm(tokens)

    def run(share: float) -> tuple[torch.Tensor, torch.Tensor]:
        kept = labels.clone()
        kept[order[round(share * tokens) :]] = -100
        states.grad = None
        if case == PLAIN:
            loss = cross_entropy((states @ weight.t()).float(), kept, reduction="sum")
        else:
            loss = summed_loss(lambda rows: rows @ weight.t(), states, targets_of(kept, torch.ones(())), vocabulary)
        loss.backward()
        assert states.grad is not None
        return loss.detach(), states.grad

    share = 1.0 if case == PLAIN else float(case)
    seconds = _seconds(lambda: run(share))
    weight.requires_grad_(False)
    row = {
        "case": case if case == PLAIN else "target rows",
        "share": share,
        "targets": round(share * tokens),
        "seconds": seconds,
        "peak_bytes": max(accumulate(allocations(lambda: run(share)))),
    }
    for each in SHARES if case == PLAIN else (share,):
        loss, gradient = run(each)
        row[f"loss at {each}"], row[f"gradient at {each}"] = float(loss), float(gradient.double().norm())
    return row


def _seconds(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    return parser.parse_args()


def allocations(run: Callable[[], object]) -> list[int]:
    """Return the bytes of each allocation that torch's profiler sees, in the order of time; freed ones are negative."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        seen.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return [int(event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"]


if __name__ == "__main__":
    main()
