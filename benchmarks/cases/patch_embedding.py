"""The patch embedding of Qwen2.5-VL as the convolution that it is saved as, and as here. Prints one JSON object.

    python -m benchmarks.cases.patch_embedding [--repeats 15] [--patches 1024] [--seconds 120]

Patches are of 2 frames of 14 x 14 pixels in 3 colours, and states have 1,280 values. Both ways take turns on one
thread, forward and backward, in float32 and bfloat16. The bars are those of torch's own linear layer on two shared
cores with fast bfloat16. Cores without it take minutes for a convolution in bfloat16, so that time limits the repeats.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, TypeAlias

import torch
from torch import nn

from benchmarks.output.result import Check, at_most, finish, show
from trials.model.ends.patches import embed_by_matrix
from trials.model.plain.small_copy import relative_difference
from trials.tasks.profiling.quiet import interquartile_range

Row: TypeAlias = dict[str, Any]
CHANNELS, SIZES, HIDDEN = 3, (2, 14, 14), 1280
TIMES = {torch.float32: 0.14 / 0.34, torch.bfloat16: 0.04 / 0.20}
"""Seconds as here over those of the convolution."""
ERRORS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def main() -> None:
    arguments = _arguments()
    found = []
    for row in rows(arguments.patches, arguments.repeats, arguments.seconds):
        show(row)
        found.append(row)
    finish(found, checks_of(found))


def checks_of(found: Sequence[Row]) -> list[Check]:
    checks = []
    for dtype, bar in TIMES.items():
        of_dtype = [row for row in found if row["dtype"] == _name(dtype)]
        checks += [
            at_most(f"{_name(dtype)}: time over that of the convolution", [row["time"] for row in of_dtype], bar),
            *(
                at_most(f"{_name(dtype)}: relative error of {what}", [row[key] for row in of_dtype], ERRORS[dtype])
                for what, key in (("states", "state_error"), ("gradients", "gradient_error"))
            ),
        ]
    return checks


def rows(patches: int, repeats: int, most_seconds: float) -> Iterator[Row]:
    """Yield the seconds of both passes in each dtype, the median of all repeats, and the errors of one pass."""
    torch.set_num_threads(1)
    for dtype in TIMES:
        torch.manual_seed(0)
        usual, here = (nn.Conv3d(CHANNELS, HIDDEN, SIZES, stride=SIZES, bias=False, dtype=dtype) for _ in range(2))
        here.load_state_dict(usual.state_dict())
        embed_by_matrix(here)
        pixels = torch.randn(patches, CHANNELS, *SIZES, dtype=dtype)
        behind = torch.randn(patches, HIDDEN, 1, 1, 1, dtype=dtype)
        (expected, wanted), (states, gradient) = (_passes(module, pixels, behind) for module in (usual, here))
        seconds = list[tuple[float, float]]()
        while len(seconds) < repeats and sum(map(sum, seconds)) < most_seconds:
            convolved, multiplied = (_seconds(module, pixels, behind) for module in (usual, here))
            seconds.append((convolved, multiplied))
        of_usual, of_here = zip(*seconds, strict=True)
        ratios = [multiplied / convolved for convolved, multiplied in seconds]
        yield {
            "dtype": _name(dtype),
            "patches": patches,
            "repeats": len(seconds),
            "convolution_seconds": median(of_usual),
            "convolution_spread": interquartile_range(of_usual),
            "seconds": median(of_here),
            "spread": interquartile_range(of_here),
            "time": median(ratios),
            "time_spread": interquartile_range(ratios),
            "state_error": relative_difference(states.float(), expected.float()),
            "gradient_error": relative_difference(gradient.float(), wanted.float()),
        }


def _seconds(module: nn.Conv3d, pixels: torch.Tensor, behind: torch.Tensor) -> float:
    """Return the seconds of both passes, for the gradient `behind` of the states."""
    began = time.perf_counter()
    _passes(module, pixels, behind)
    return time.perf_counter() - began


def _passes(module: nn.Conv3d, pixels: torch.Tensor, behind: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states and the gradient of the weight."""
    states = module(pixels)
    (gradient,) = torch.autograd.grad(states, module.weight, behind)
    return states.detach(), gradient


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="of both ways, in turns (%(default)s)")
    parser.add_argument("--seconds", type=float, default=120, help="of the repeats in a dtype, at most (%(default)s)")
    parser.add_argument("--patches", type=int, default=1024, help="of one pass (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
