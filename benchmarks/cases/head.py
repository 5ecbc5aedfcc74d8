"""Time and memory of the head and the loss by the share of tokens with a label. Prints one JSON object.

    python -m benchmarks.cases.head [--tokens 1024] [--hidden 512] [--vocabulary 151936]

Each case is a process of its own on one core: a forward and a backward pass in float32, less those of a pass with one
target. `all rows` computes the logits of every token at once, as a plain loop does; the others are those of a training.
"""

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.output.result import at_most, finish, show
from trials.model.ends.head_loss import summed_loss, targets_of

SHARES = (0.05, 0.1, 0.2, 0.4)
PLAIN = "all rows"
_REPEATS = 3


def main() -> None:
    arguments = _arguments()
    rows = []
    for case in (PLAIN, *SHARES):
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # whose peak of memory is that of the case
            rows.append(pool.apply(_measured, (case, arguments.tokens, arguments.hidden, arguments.vocabulary)))
        show(rows[-1])
    plain, *others = rows
    whole = next(row for row in others if row["share"] == max(SHARES))
    finish(
        rows,
        [
            at_most(
                f"{name} per target over that with a share of {max(SHARES)}, off from 1",
                [abs(row[name] / row["targets"] / (whole[name] / whole["targets"]) - 1) for row in others],
                0.1,
            )
            for name in ("seconds", "peak_bytes")
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
    # What any pass needs: the gradient of the whole weight.
    least_seconds, least_bytes = _seconds(lambda: run(1 / tokens)), _peak_bytes()
    seconds = _seconds(lambda: run(share))
    row = {
        "case": case if case == PLAIN else "target rows",
        "share": share,
        "targets": round(share * tokens),
        "seconds": seconds - least_seconds,
        "peak_bytes": _peak_bytes() - least_bytes,
        "seconds_of_one_target": least_seconds,
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


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    return parser.parse_args()


if __name__ == "__main__":
    main()
