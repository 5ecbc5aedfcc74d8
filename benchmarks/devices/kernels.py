"""What layers compute otherwise than usual, on a device: errors and times of both ways."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.devices.target import KernelSizes
from trials.model.attention.kernels import kernel_for, one_by_one
from trials.model.attention.samples import PackedSamples
from trials.model.ends.head_loss import summed_loss, targets_of
from trials.model.ends.patches import embed_by_matrix

_REPEATS = 9


def rows(device: torch.device, sizes: KernelSizes) -> Iterator[dict[str, Any]]:
    """Yield rows of the attention of packs, of patch embeddings, and of the head."""
    for name, (heads, kv_heads, width, lengths, causal) in sizes.attention.items():
        yield {"kernel": f"attention, {name}", **_attention(device, heads, kv_heads, width, lengths, causal=causal)}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        yield {"kernel": f"patch embedding, {name}", **_patches(device, dtype, sizes.patches)}
    yield {"kernel": "head", **_head(device, *sizes.head)}


def _attention(
    device: torch.device, heads: int, kv_heads: int, width: int, lengths: tuple[int, ...], *, causal: bool
) -> dict[str, Any]:
    """Return errors of the kernel that a layer chooses, and of one call per sample, and times of both."""
    torch.manual_seed(0)
    total = sum(lengths)
    exact = [torch.randn(1, count, total, width, device=device) for count in (heads, kv_heads, kv_heads)]
    behind = torch.randn(1, heads, total, width, device=device)
    rounded = [each.bfloat16().requires_grad_() for each in exact]
    samples = PackedSamples(lengths, causal=causal)
    chosen = kernel_for(rounded[0], rounded[2], samples, 0.0)
    options: dict[str, Any] = {"window": None, "scaling": None, "dropout": 0.0}

    def passes(kernel: Any, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        found = kernel(*inputs, samples, **options)
        return (found.detach(), *torch.autograd.grad(found, inputs, behind.to(found.dtype)))

    names = ("output", "query", "key", "value")
    expected = _attended(exact, lengths, behind, causal=causal)
    row: dict[str, Any] = {"chosen": getattr(chosen, "__name__", str(chosen))}
    for way, kernel in (("error", chosen), ("error_of_one_by_one", one_by_one)):
        found = passes(kernel, rounded)
        pairs = zip(names, found, expected, strict=True)
        row[way] = {name: float((one.float() - other).norm() / other.norm()) for name, one, other in pairs}
    return row | _times(device, lambda: passes(one_by_one, rounded), lambda: passes(chosen, rounded))


def _attended(
    inputs: list[torch.Tensor], lengths: tuple[int, ...], behind: torch.Tensor, *, causal: bool
) -> tuple[torch.Tensor, ...]:
    """Return the output and the gradients of query, key and value, by the definition: a softmax of all scores.

    In float64, head by head, with a mask over the whole pack, so that no code of a stage has a part in it.
    """
    query, key, value = (each[0].double() for each in inputs)
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(query.device)
    hidden = sample[:, None] != sample
    if causal:
        place = torch.arange(len(sample), device=query.device)
        hidden |= place[:, None] < place
    output, gradients = torch.zeros_like(query), [torch.zeros_like(each) for each in (query, key, value)]
    for head in range(len(query)):
        group = head * len(key) // len(query)
        own = [each.clone().requires_grad_() for each in (query[head], key[group], value[group])]
        scores = (own[0] @ own[1].t() / query.shape[-1] ** 0.5).masked_fill(hidden, float("-inf"))
        found = scores.softmax(dim=1) @ own[2]
        output[head] = found.detach()
        parts = torch.autograd.grad(found, own, behind[0, head].double())
        for gradient, at, part in zip(gradients, (head, group, group), parts, strict=True):
            gradient[at] += part
    return tuple(each[None].float() for each in (output, *gradients))


def _patches(device: torch.device, dtype: torch.dtype, patches: int) -> dict[str, Any]:
    torch.manual_seed(0)
    usual, here = (
        nn.Conv3d(3, 1280, (2, 14, 14), stride=(2, 14, 14), bias=False, dtype=dtype, device=device) for _ in range(2)
    )
    here.load_state_dict(usual.state_dict())
    embed_by_matrix(here)
    pixels = torch.randn(patches, 3, 2, 14, 14, dtype=dtype, device=device)
    behind = torch.randn(patches, 1280, 1, 1, 1, dtype=dtype, device=device)

    def passes(module: nn.Conv3d) -> tuple[torch.Tensor, torch.Tensor]:
        states = module(pixels)
        return states.detach(), torch.autograd.grad(states, module.weight, behind)[0]

    pairs = zip(("states", "weight"), passes(here), passes(usual), strict=True)
    errors = {name: float((one.float() - other.float()).norm() / other.float().norm()) for name, one, other in pairs}
    return {"error": errors, **_times(device, lambda: passes(usual), lambda: passes(here))}


def _head(device: torch.device, tokens: int, hidden: int, vocabulary: int, share: float) -> dict[str, Any]:
    """Return the times of the loss of all rows and of the labelled rows, with `share` of the tokens labelled."""
    torch.manual_seed(0)
    states = torch.randn(tokens, hidden, device=device).bfloat16().requires_grad_()
    weight = nn.Parameter((torch.randn(vocabulary, hidden, device=device) / hidden**0.5).bfloat16())
    labels = torch.randint(0, vocabulary, (tokens,))
    labels[torch.randperm(tokens)[round(share * tokens) :]] = -100
    on_device = labels.to(device)
    targets = targets_of(labels, torch.ones(()))
    targets = type(targets)(*(each.to(device) for each in targets))

    def passes(loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
        states.grad = weight.grad = None
        loss.backward()
        assert states.grad is not None
        assert weight.grad is not None
        return loss.detach(), states.grad, weight.grad

    def all_rows() -> tuple[torch.Tensor, ...]:
        return passes(cross_entropy((states @ weight.t()).float(), on_device, reduction="sum"))

    def target_rows() -> tuple[torch.Tensor, ...]:
        return passes(summed_loss(lambda rows: rows @ weight.t(), states, targets, vocabulary))

    pairs = zip(("loss", "states", "weight"), target_rows(), all_rows(), strict=True)
    errors = {name: float((one.float() - other.float()).norm() / other.float().norm()) for name, one, other in pairs}
    return {"labelled": share, "error": errors, **_times(device, all_rows, target_rows)}


def _times(device: torch.device, usual: Callable[[], Any], here: Callable[[], Any]) -> dict[str, float]:
    """Return the seconds of both, in turns, and the median of their ratios."""
    seconds = list[tuple[float, float]]()
    for run in (usual, here):
        _seconds(device, run)
    for _ in range(_REPEATS):
        seconds.append((_seconds(device, usual), _seconds(device, here)))
    of_usual, of_here = zip(*seconds, strict=True)
    return {
        "usual_seconds": statistics.median(of_usual),
        "seconds": statistics.median(of_here),
        "time": statistics.median(one / other for other, one in seconds),
    }


def _seconds(device: torch.device, run: Callable[[], Any]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
