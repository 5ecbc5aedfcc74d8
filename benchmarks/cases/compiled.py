"""One vision and one language layer as they are and compiled, in turns. Prints one JSON object.

    python -m benchmarks.cases.compiled [--dtype float32] [--repeats 15]

Layers are compiled as with `training.compile`, and are those of the example. Counted are the seconds of both passes,
the bytes that a layer keeps between them, the seconds of the first passes, in which it is compiled, and the packs after
which one layer has repaid them. A stage repays them as many times faster as it has layers.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from benchmarks.output.result import Check, at_most, finish, show
from benchmarks.prediction import EXAMPLE
from trials.costs.coefficients import LayerKind
from trials.engine.compiled import compile_layers, compiled_graphs
from trials.engine.stopwatch import Stopwatch
from trials.job import ModelSection, TrainingSection
from trials.tasks.profiling.layer_profile import Profiler
from trials.tasks.profiling.one_of_each import one_of_each
from trials.tasks.profiling.probes import Probe, Run, probes
from trials.tasks.request import ProbeSizes

Row: TypeAlias = dict[str, Any]
KINDS: tuple[LayerKind, ...] = ("vision", "language")
SIZES = ProbeSizes(unit_counts=(4, 1, 10), sample_shapes=((4, 60), (1, 500), (4, 150)))
"""By default torch specializes graphs on a size of 1."""
GRADIENT_ERROR = 1e-5


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(EXAMPLE / "generate.py"), "--folder", folder, "--samples", "48"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        model = Path(folder, "model")
        found = []
        for row in rows(model, arguments.dtype, torch.device("cpu"), SIZES, arguments.repeats):
            show(row)
            found.append(row)
    finish(found, checks_of(found, arguments.dtype))


def checks_of(found: Sequence[Row], dtype: str) -> list[Check]:
    def values(key: str) -> list[float]:
        return [row[key] for row in found if key in row]

    exact = [at_most("relative error of gradients", values("gradient_error"), GRADIENT_ERROR)]
    return [
        *(exact if dtype == "float32" else []),
        at_most("graphs that are compiled after the warm-up", values("later_graphs"), 0.0),
        at_most("kept bytes, compiled over as it is", values("kept"), 1.0),
    ]


def rows(model: Path, dtype: str, device: torch.device, sizes: ProbeSizes, repeats: int) -> Iterator[Row]:
    """Yield what the warm-up of each kind takes, and the times of each size."""
    torch.set_num_threads(1)
    settings = ModelSection.model_validate({"path": str(model), "dtype": dtype, "weights": "random"})
    stage = one_of_each(settings, TrainingSection(), device)
    plain = [_plain(probe) for probe in probes(stage, sizes, device) if probe.layer in KINDS]
    profiler = Profiler(stage, dict.fromkeys(KINDS, True), device, repeats)
    compile_layers(stage)
    compiled = [replace(probe, recomputed=None) for probe in probes(stage, sizes, device) if probe.layer in KINDS]
    warm_up: dict[LayerKind, float] = {}
    for kind in KINDS:
        # The last size is new to what was compiled.
        pairs = [pair for pair in zip(plain, compiled, strict=True) if pair[0].layer == kind]
        before, began = compiled_graphs(), time.perf_counter()
        for _, probe in pairs[:-1]:
            _gradient(probe)
        warm_up[kind] = time.perf_counter() - began
        yield {"layer": kind, "warm_up_seconds": warm_up[kind], "graphs": compiled_graphs() - before}
    known = compiled_graphs()
    for one, other in zip(plain, compiled, strict=True):
        seconds, ratio = _times(one, other, device, repeats)
        yield {
            "layer": one.layer,
            "units": one.units,
            "tokens": one.tokens,
            "seconds": seconds,
            "time": ratio,
            "kept": profiler.sizes(other).kept / profiler.sizes(one).kept,
            "gradient_error": _error(one, other),
            "packs_to_repay": warm_up[one.layer] / (seconds * (1 - ratio)) if ratio < 1 else None,
            "later_graphs": compiled_graphs() - known,
        }


def _times(plain: Probe, compiled: Probe, device: torch.device, repeats: int) -> tuple[float, float]:
    """Return the seconds of both passes of a layer as it is, and the time compiled over this: the median of pairs."""
    stopwatch, seconds, ratios = Stopwatch(device), [], []
    for _ in range(repeats):
        for name, probe in (("plain", plain), ("compiled", compiled)):
            with stopwatch.section(name):
                _gradient(probe)
        times = stopwatch.read()
        seconds.append(times["plain"])
        ratios.append(times["compiled"] / times["plain"])
    return statistics.median(seconds), statistics.median(ratios)


def _plain(probe: Probe) -> Probe:
    """Return the probe of the layer as it is.

    Recomputation, which would run in the backward pass, is left out, and so is what does not go with compiled layers.
    """

    def plainly(run: Run) -> Run:
        def run_plainly(states: torch.Tensor) -> torch.Tensor:
            with torch.compiler.set_stance("force_eager"):
                return run(states)

        return run_plainly

    twice: Callable[[torch.Tensor], torch.Tensor] | None = probe.twice and plainly(probe.twice)
    return replace(probe, run=plainly(probe.run), recomputed=None, selective=None, deferred=None, twice=twice)


def _gradient(probe: Probe) -> torch.Tensor:
    """Return the gradient of the states of a probe."""
    states = probe.states.detach().clone().requires_grad_()
    probe.run(states).square().sum().backward()
    assert states.grad is not None
    return states.grad.float()


def _error(plain: Probe, compiled: Probe) -> float:
    # Each probe has states of its own.
    expected, found = _gradient(plain), _gradient(replace(compiled, states=plain.states))
    return float((found - expected).norm() / expected.norm())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the layers (%(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=15, help="of each size (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
