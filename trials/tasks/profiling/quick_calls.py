"""Slow calls of single layers, in a process that ends: `python -m trials.tasks.profiling.quick_calls`.

It reads `QuickCalls` from stdin and writes a tuple of `SlowCall` to stdout.
"""

import atexit
import gc
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass

from trials import wire
from trials.costs.coefficients import SlowCall
from trials.job import ModelSection, TrainingSection


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickCalls:
    """Layers of a model to try on the first device."""

    model: ModelSection
    training: TrainingSection
    accelerator: str
    """`cuda` or `cpu`."""
    has_images: bool
    """Whether the data have any."""


def _main() -> None:
    # Collections during the imports, and the last one before the exit, find nothing: a fifth of the CPU time.
    gc.disable()
    atexit.register(gc.freeze)
    with redirect_stdout(sys.stderr):  # DeepSpeed logs to stdout, which is for the answer
        import torch  # noqa: PLC0415

        from trials.tasks.profiling.layer_profile import quick_slow_calls  # noqa: PLC0415

        asked = wire.decode(QuickCalls, sys.stdin.read())
        device = torch.device(asked.accelerator)
        calls = quick_slow_calls(asked.model, asked.training, device, has_images=asked.has_images)
    sys.stdout.write(wire.encode(calls, tuple[SlowCall, ...]))


if __name__ == "__main__":
    _main()
