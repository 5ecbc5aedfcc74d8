"""Requests that ranks serve with a fault in their computation."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from trials.data import epoch, loader
from trials.engine import engine
from trials.run.serving import serve
from trials.tasks import session


def wrong_scale() -> AbstractContextManager[Any]:
    """Count one target too few in some 500."""
    tensors = engine._tensors
    return patch.object(engine, "_tensors", lambda batch, scale, device: tensors(batch, 1.002 * scale, device))


def lost_sample() -> AbstractContextManager[Any]:
    """Leave the last sample out of every pack of several."""
    collate = loader.collate
    return patch.object(
        loader, "collate", lambda samples, *rest, **how: collate(samples[: len(samples) - 1 or 1], *rest, **how)
    )


def shifted_positions() -> AbstractContextManager[Any]:
    """Leave one position out in the middle of a pack's first sample."""

    def shifted(samples: list[Any], *rest: Any, **how: Any) -> loader.MicroBatch:
        batch = collate(samples, *rest, **how)
        positions = batch.tokens.positions.clone()
        first = batch.tokens.lengths[0]
        positions[:, first // 2 : first] += 1
        return replace(batch, tokens=replace(batch.tokens, positions=positions))

    collate = loader.collate
    return patch.object(loader, "collate", shifted)


def repeated_sample() -> AbstractContextManager[Any]:
    """Show one sample of the epoch in place of another."""

    def changed(*arguments: Any, **how: Any) -> epoch.Epoch:
        built = job_epoch(*arguments, **how)
        samples = np.array(built.packs.samples)
        samples[-1] = samples[0]
        return replace(built, packs=replace(built.packs, samples=samples))

    job_epoch = epoch.job_epoch
    return patch.object(session, "job_epoch", changed)


FAULTS: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "wrong-scale": wrong_scale,
    "lost-sample": lost_sample,
    "shifted-positions": shifted_positions,
    "repeated-sample": repeated_sample,
}


def serve_with_faults(folder: Path) -> bool:
    """Serve the request in each subfolder with the fault that it is named after; return whether all were served."""
    served = []
    for name in FAULTS:
        with FAULTS[name]():
            served.append(serve(folder / name))
    return all(served)
