"""Averages of gradients over data ranks that run while the last backward pass of a step computes further gradients."""

from collections.abc import Iterable, Sequence

import torch
from torch import distributed, nn

from trials.engine.static_memory import GRADIENT_BYTES
from trials.model.paths import parameters_at
from trials.model.stage import StageModule


class OverlappedAverages:
    """One rank's part in the averages of the buckets of gradients.

    A bucket is summed as soon as the pass has all of its gradients, and the buckets before it are being summed. What
    the pass leaves, such as a vision tower without images on this rank, is summed after it. So all ranks sum the same
    buckets in the same order, whichever gradients they have, and none waits for a bucket that another one leaves out.

    The pass has the gradients of the head when it has left it: a loss in chunks adds to them with each chunk.
    """

    def __init__(self, stage: StageModule, bucket_bytes: int) -> None:
        """Average the gradients of a stage, which `FlatGradients` hold in the order of the buckets."""
        self._buckets = buckets(as_reached(stage), bucket_bytes)
        self._bucket_of = {each: number for number, bucket in enumerate(self._buckets) for each in bucket}
        others = {
            each for path in stage.paths if path not in stage.chain.head for _, each in parameters_at(stage.model, path)
        }
        self._of_head = [each for each in self._bucket_of if each not in others]
        """Parameters of the head alone, and not its weight that is the word embedding."""
        self._in_head = False
        """Whether the last pass of a step has yet to leave the head."""
        self._entering: Sequence[torch.Tensor] = ()
        """The states that came last to a place of the chain: behind a forward pass, those before the head."""
        self._missing: list[set[nn.Parameter]] = []
        """Parameters of each bucket whose gradient is not complete; empty but in the last pass of a step."""
        self._sums: list[tuple[torch.Tensor, distributed.Work]] = []
        """Averages that have begun, of the first buckets."""
        self._hooks = [each.register_post_accumulate_grad_hook(self._take) for each in self._bucket_of]
        stage.reached = self._reach

    def begin(self) -> None:
        """Call it between the last forward and the last backward pass of a step."""
        self._missing, self._in_head = [set(bucket) for bucket in self._buckets], True
        for each in self._entering:
            if each.requires_grad:  # else no gradient leaves the head, and `finish` sums all
                each.register_hook(self._leave_head)
        self._entering = ()

    def finish(self) -> None:
        """Replace all gradients by their averages. Every rank must call it after the pass."""
        while len(self._sums) < len(self._buckets):
            self._sum_next()
        for bucket, (joined, work) in zip(self._buckets, self._sums, strict=True):
            work.wait()
            joined.div_(distributed.get_world_size())
            gradients = _gradients(bucket)
            if gradients[0].data_ptr() != joined.data_ptr():  # copied, as they lay apart
                for each, part in zip(gradients, joined.split([each.numel() for each in gradients]), strict=True):
                    each.copy_(part.view_as(each))
        self._missing, self._sums = [], []

    def close(self) -> None:
        """Leave the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _reach(self, states: Sequence[torch.Tensor]) -> None:
        self._entering = states

    def _leave_head(self, _: torch.Tensor) -> None:
        self._in_head = False
        for each in self._of_head:
            self._take(each)

    def _take(self, parameter: nn.Parameter) -> None:
        if self._in_head or not self._missing:
            return
        number = self._bucket_of[parameter]
        if number < len(self._sums):
            raise RuntimeError(
                "a parameter got a further gradient while its first one was averaged, as in layers that share weights "
                "and are recomputed; leave bucket_bytes out of the plan's layout"
            )
        self._missing[number].discard(parameter)
        while len(self._sums) < len(self._buckets) and not self._missing[len(self._sums)]:
            self._sum_next()

    def _sum_next(self) -> None:
        gradients = _gradients(self._buckets[len(self._sums)])
        joined = adjoining(gradients)
        if joined is None:
            joined = torch.cat([each.flatten() for each in gradients])
        work = distributed.all_reduce(joined, async_op=True)
        assert work is not None  # only a rank outside of the group has none
        self._sums.append((joined, work))


def buckets(parameters: Iterable[nn.Parameter], least_bytes: int) -> list[list[nn.Parameter]]:
    """Return parameters whose gradients are summed together, ordered by the last of each.

    A gradient of `least_bytes` or more is alone, so that it is not copied.
    """
    found: list[list[nn.Parameter]] = []
    small: list[nn.Parameter] = []
    for parameter in parameters:
        if parameter.numel() * GRADIENT_BYTES >= least_bytes:
            found.append([parameter])
            continue
        small.append(parameter)
        if sum(each.numel() for each in small) * GRADIENT_BYTES >= least_bytes:
            found.append(small)
            small = []
    return [*found, small] if small else found


def as_reached(stage: StageModule) -> list[nn.Parameter]:
    """Return the parameters that train in the order in which a backward pass has their gradients.

    A tied weight has its gradient when the pass has reached the first layer that holds it.
    """
    of_chain = [each for path in stage.paths for _, each in parameters_at(stage.model, path) if each.requires_grad]
    return [*reversed(dict.fromkeys(of_chain))]


def adjoining(gradients: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return gradients that lie one behind the other as one flat view; None where they do not."""
    first, end = gradients[0], gradients[0].data_ptr()
    for each in gradients:
        if not each.is_contiguous() or each.data_ptr() != end or each.dtype != first.dtype:
            return None
        end += each.nbytes
    if end - first.untyped_storage().data_ptr() > first.untyped_storage().nbytes():
        return None  # neighbours by chance, in storages of their own
    return first.as_strided((sum(each.numel() for each in gradients),), (1,))


def _gradients(bucket: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [each.grad for each in bucket if each.grad is not None]
