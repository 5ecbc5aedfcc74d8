"""Requests that ranks serve with a fault in their computation."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import distributed

from trials.channels.folder import FolderChannel
from trials.data import epoch, loader
from trials.engine import base, engine
from trials.engine.gathering import GatheredWeights
from trials.model import decoder
from trials.model.attention.samples import PackedSamples
from trials.run.serving import serve
from trials.sharing import group as sharing
from trials.sharing.group import SharingGroup
from trials.sharing.share import Share
from trials.tasks import session


def wrong_scale() -> AbstractContextManager[Any]:
    """Count one target too few in some 500."""
    tensors = base.tensors
    return patch.object(base, "tensors", lambda batch, scale, device: tensors(batch, 1.002 * scale, device))


def lost_sample() -> AbstractContextManager[Any]:
    """Leave the last sample out of every pack of several."""
    collate = loader.collate
    return patch.object(
        loader, "collate", lambda samples, *rest, **how: collate(samples[: len(samples) - 1 or 1], *rest, **how)
    )


def lost_weights() -> AbstractContextManager[Any]:
    """Count every target equally, where the job weighs samples."""
    tensors = base.tensors
    return patch.object(
        base, "tensors", lambda batch, scale, device: tensors(replace(batch, weights=None), scale, device)
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
        built = build_epoch(*arguments, **how)
        samples = np.array(built.packs.samples)
        samples[-1] = samples[0]
        return replace(built, packs=replace(built.packs, samples=samples))

    build_epoch = epoch.build_epoch
    return patch.object(session, "build_epoch", changed)


FAULTS: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "wrong-scale": wrong_scale,
    "lost-sample": lost_sample,
    "lost-weights": lost_weights,
    "shifted-positions": shifted_positions,
    "repeated-sample": repeated_sample,
}


def lengths_of_the_slice() -> AbstractContextManager[Any]:
    """Attend inside the equal parts of a pack that ranks share, in place of its samples."""
    return patch.object(decoder, "PackedSamples", lambda lengths: PackedSamples((half := sum(lengths) // 2, half)))


def scale_of_the_slice() -> AbstractContextManager[Any]:
    """Divide the loss by the targets of one rank's part, as if each were a step of its own."""
    tensors = base.tensors
    return patch.object(base, "tensors", lambda batch, scale, device: tensors(batch, 2 * scale, device))


def labels_of_another_rank() -> AbstractContextManager[Any]:
    """Give each rank the labels of the other part of a pack."""
    part = Share.part

    def labels(share: Share, tokens: int) -> slice:
        return part(replace(share, index=(share.index + 1) % share.degree), tokens)

    def collated(*arguments: Any, **how: Any) -> loader.MicroBatch:
        with patch.object(Share, "part", labels):
            return collate(*arguments, **how)

    collate = loader.collate
    return patch.object(loader, "collate", collated)


def features_of_the_slice() -> AbstractContextManager[Any]:
    """Let each rank keep the features of its own tiles, repeated where its tokens take more."""

    def kept(_: SharingGroup, features: list[torch.Tensor], wanted: torch.Tensor, checksum: int) -> list[torch.Tensor]:
        return [torch.cat([each] * len(wanted)) for each in features]

    return patch.object(SharingGroup, "features_of_tokens", kept)


def mixed_rows() -> AbstractContextManager[Any]:
    """Mix packs that ranks share and others in each row of four ranks: no fault, but no row of a real epoch either."""

    def mixed(*arguments: Any, **how: Any) -> epoch.Epoch:
        built = build_epoch(*arguments, **how)
        alone, shared = (np.sort(built.packs.of_level(level)) for level in (0, 1))
        assert len(alone) >= 4, built.assignment
        assert len(shared) >= 2, built.assignment
        rows = [
            [pack, pack, *alone[number : number + 2]] if number % 4 else [*alone[number : number + 2], pack, pack]
            for number, pack in zip(range(0, len(alone), 2), shared, strict=False)
        ]
        # One step has all rows, which are fewer than those of whole levels.
        return replace(built, arranged=lambda: np.array(rows), micro_batches=built.height)

    build_epoch = epoch.build_epoch
    return patch.object(session, "build_epoch", mixed)


def serve_with_mixed_rows(folder: Path) -> bool:
    """Serve the request with rows of packs of different sequence degrees."""
    with mixed_rows():
        return serve(FolderChannel(folder))


SHARING_FAULTS: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "lengths": lengths_of_the_slice,
    "scale": scale_of_the_slice,
    "labels": labels_of_another_rank,
    "features": features_of_the_slice,
}


def serve_with_sharing_faults(folder: Path) -> bool:
    """Do the same with the faults of packs that two ranks share."""
    return _serve(folder, SHARING_FAULTS)


def gradients_of_the_slice() -> AbstractContextManager[Any]:
    """Leave the gradients of what both ranks hold whole as they are, of each rank's own tokens."""
    return patch.object(engine, "sum_gradients", lambda *_: None)


class _JoinAlone(torch.autograd.Function):
    """All-gather of two parts, with the gradient of this rank alone."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
        ctx.rank = distributed.get_rank(group)
        whole = part.new_empty(2 * len(part), *part.shape[1:])
        distributed.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].chunk(2)[ctx.rank], None


def gather_without_sum() -> AbstractContextManager[Any]:
    """Let the gradient of gathered states be that of this rank's slices alone."""
    return patch.object(sharing, "_Join", _JoinAlone)


def slices_of_another_rank() -> AbstractContextManager[Any]:
    """Give each rank the other's columns, so that they do not fit its rows."""
    sliced = SharingGroup.slice_of

    def swapped(group: SharingGroup, whole: torch.Tensor, dimension: int) -> torch.Tensor:
        share = group.share
        index = (share.index + dimension) % share.degree
        return sliced(replace(group, share=replace(share, index=index)), whole, dimension)

    return patch.object(SharingGroup, "slice_of", swapped)


TENSOR_FAULTS: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "lengths": lengths_of_the_slice,
    "scale": scale_of_the_slice,
    "labels": labels_of_another_rank,
    "gradients": gradients_of_the_slice,
    "gather": gather_without_sum,
    "slices": slices_of_another_rank,
}


def serve_with_tensor_faults(folder: Path) -> bool:
    """Do the same with the faults of layers that two ranks hold together."""
    return _serve(folder, TENSOR_FAULTS)


def _empty_weights(weights: GatheredWeights) -> None:
    """Make room for weights, of zeros."""
    if not weights.is_here:
        weights.whole.untyped_storage().resize_(weights.whole.numel() * weights.whole.itemsize)
        weights.whole.zero_()
        weights.is_here = True


def forgotten_gather() -> AbstractContextManager[Any]:
    """Gather no weights."""
    return patch.object(GatheredWeights, "gather", _empty_weights)


def late_gather() -> AbstractContextManager[Any]:
    """Gather weights when the layer has run."""
    release = GatheredWeights.release

    def released(weights: GatheredWeights) -> None:
        if weights.is_here and weights.places:
            distributed.all_gather_into_tensor(weights.whole, weights.own.clone())
        release(weights)

    both = ExitStack()
    both.enter_context(forgotten_gather())
    both.enter_context(patch.object(GatheredWeights, "release", released))
    return both


def gradient_scattered_twice() -> AbstractContextManager[Any]:
    """Add what a rank has received of a pack's gradients twice."""
    take = GatheredWeights.take_scattered

    def taken(weights: GatheredWeights) -> None:
        assert weights.gradients is not None
        before = weights.gradients.clone()
        take(weights)
        weights.gradients.add_(weights.gradients - before)

    return patch.object(GatheredWeights, "take_scattered", taken)


SHARD_FAULTS: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "forgotten": forgotten_gather,
    "late": late_gather,
    "twice": gradient_scattered_twice,
}


def serve_with_shard_faults(folder: Path) -> bool:
    """Do the same with the faults of weights and gradients in shards."""
    return _serve(folder, SHARD_FAULTS)


def serve_with_faults(folder: Path) -> bool:
    """Serve the request in each subfolder with the fault that it is named after; return whether all were served."""
    return _serve(folder, FAULTS)


def _serve(folder: Path, faults: Mapping[str, Callable[[], AbstractContextManager[Any]]]) -> bool:
    served = []
    for name in faults:
        with faults[name]():
            served.append(serve(FolderChannel(folder / name)))
    return all(served)
