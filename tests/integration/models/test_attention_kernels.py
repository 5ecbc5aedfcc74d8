"""One call for all samples of a pack computes what one call for each sample computes."""

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen

from tests.contracts.test_families import TINY
from tests.machines import varlen as stand_in
from tests.machines.own_ranks import on_ranks
from tests.values.parameters import parameters
from trials import plugins
from trials.channels.folder import file_rendezvous
from trials.data.tokens import pack
from trials.engine.group import process_group
from trials.job import ModelSection, TrainingSection
from trials.model.attention import packed, scores
from trials.model.attention.kernels import Kernel, kernel_for, one_by_one, together
from trials.model.attention.packed import packed_attention
from trials.model.attention.samples import PackedSamples
from trials.model.attention.scores import by_scores
from trials.model.family import join_samples
from trials.model.skeleton import load_config
from trials.sharing.group import join_groups
from trials.tasks.profiling.one_of_each import one_of_each

CPU = torch.device("cpu")
ORIGINAL = varlen.varlen_attn


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    lengths: tuple[int, ...] = (7, 1, 12, 4)
    heads: tuple[int, int] = (4, 4)
    """Of the query, and of key and value."""
    size: int = 16
    causal: bool = True
    window: int | None = None
    scaling: float | None = None


CASES = {
    "causal": Case(),
    "one sample": Case(lengths=(9,)),
    "one token": Case(lengths=(1,)),
    "samples of one token": Case(lengths=(1, 1, 1)),
    "grouped heads": Case(heads=(6, 2)),
    "one head of key and value": Case(heads=(4, 1)),
    "window": Case(window=3),
    "window of one token": Case(window=1),
    "window as long as the longest sample": Case(window=12),
    "window longer than the pack": Case(window=100),
    "window and grouped heads": Case(window=5, heads=(4, 2)),
    "scaled": Case(scaling=0.7),
    "narrow heads": Case(size=10),
    "narrow heads, scaled": Case(size=3, scaling=1.3),
    "whole samples": Case(causal=False),
    "whole samples, grouped heads": Case(causal=False, heads=(4, 2), size=12),
}


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", stand_in.varlen_attn)


def tensors(case: Case) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    heads, kv_heads = case.heads
    # As layers make them: [1, T, heads, d], transposed.
    shapes = [(1, sum(case.lengths), count, case.size) for count in (heads, kv_heads, kv_heads)]
    return tuple(torch.randn(shape).transpose(1, 2).requires_grad_() for shape in shapes)


def attended(kernel: Kernel, case: Case) -> tuple[torch.Tensor, ...]:
    """The output, and the gradients of query, key and value for a gradient that differs from place to place."""
    query, key, value = tensors(case)
    samples = PackedSamples(case.lengths, causal=case.causal)
    output = kernel(query, key, value, samples, window=case.window, scaling=case.scaling, dropout=0.0)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    (output * weights).sum().backward()
    return output, *(each.grad for each in (query, key, value) if each.grad is not None)


def test_the_stand_in_takes_what_the_function_takes() -> None:
    original, replaced = (
        [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]
        for function in (ORIGINAL, stand_in.varlen_attn)
    )
    assert original == replaced


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_both_kernels_compute_the_same_output_and_gradients(case: Case) -> None:
    for found, expected in zip(attended(together, case), attended(one_by_one, case), strict=True):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected)


def wide(*given: Any, **options: Any) -> torch.Tensor:
    """Explicit scores, with a cap and sinks that change nothing."""
    return by_scores(*given, **options, cap=1e6, sinks=torch.full((given[0].shape[1],), -1e4))


@pytest.mark.parametrize("bytes_at_once", [scores._SCORES_BYTES, 128], ids=["at once", "in chunks"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_explicit_scores_compute_the_same_output_and_gradients(
    case: Case, bytes_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "_SCORES_BYTES", bytes_at_once)
    for found, expected in zip(attended(wide, case), attended(one_by_one, case), strict=True):
        torch.testing.assert_close(found, expected)


def test_explicit_scores_are_capped_and_share_attention_with_sinks() -> None:
    query, key, value = tensors(Case(lengths=(2,), heads=(1, 1), size=4))
    sinks = torch.tensor([0.3], requires_grad=True)
    options: dict[str, Any] = {"window": None, "scaling": 2.0, "dropout": 0.0}
    found = by_scores(query, key, value, PackedSamples((2,)), **options, cap=1.5, sinks=sinks)
    capped = 1.5 * torch.tanh((query[0, 0] @ key[0, 0].T) * 2.0 / 1.5)
    shares = torch.softmax(torch.cat([capped[1], sinks]), dim=0)
    torch.testing.assert_close(found[0, 0, 1], shares[:2] @ value[0, 0])
    torch.testing.assert_close(found[0, 0, 0], torch.softmax(torch.cat([capped[0, :1], sinks]), 0)[0] * value[0, 0, 0])
    found.sum().backward()
    assert sinks.grad is not None
    assert sinks.grad.abs() > 1e-3


def test_explicit_scores_keep_no_scores_for_the_backward_pass() -> None:
    kept: list[int] = []
    case = Case(lengths=(256,), heads=(2, 2), size=4)

    def noting(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(noting, lambda each: each):
        attended_alone = wide(*tensors(case), PackedSamples(case.lengths), window=None, scaling=None, dropout=0.0)
    assert attended_alone.requires_grad
    assert max(kept) < 256 * 256


def test_a_sample_of_a_pack_sees_nothing_of_the_others() -> None:
    """As a wrong end of a sample would show it: a change in one sample changes no other."""
    case = Case(lengths=(3, 5))
    query, key, value = tensors(case)
    samples = PackedSamples(case.lengths)
    before, after = (
        together(query, key + change, value, samples, window=None, scaling=None, dropout=0.0)
        for change in (0.0, torch.cat([torch.ones(3), torch.zeros(5)])[:, None])
    )
    assert torch.equal(before[:, :, 3:], after[:, :, 3:])
    assert not torch.equal(before[:, :, :3], after[:, :, :3])


def test_the_ends_of_the_samples_are_copied_once() -> None:
    samples = PackedSamples((3, 1))
    ends = samples.ends(CPU)
    assert ends.tolist() == [0, 3, 4]
    assert samples.ends(CPU) is ends


# --- the choice ---

FITTING: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "size": 64,
    "value": 64,
    "device": "cuda",
    "dropout": 0.0,
    "blocks": [-1, -1],
}
UNFITTING: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "float64": {"dtype": torch.float64},
    "wide heads": {"size": 264, "value": 264},
    "values of another width": {"value": 32},
    "CPU": {"device": "cpu"},
    "dropout": {"dropout": 0.1},
    "blocks": {"blocks": [-1, 0]},
}


def chosen(capability: tuple[int, int], given: dict[str, Any]) -> Kernel:
    case = FITTING | given
    samples = PackedSamples((2,), torch.tensor(case["blocks"]))
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        query, value = (
            torch.empty(1, 4, 2, size, dtype=case["dtype"], device=case["device"])
            for size in (case["size"], case["value"])
        )
        return kernel_for(query, value, samples, case["dropout"])


@pytest.mark.parametrize(
    "given", [{}, {"dtype": torch.float16}, {"size": 256, "value": 256}, {"size": 20, "value": 20}]
)
def test_half_precision_on_a_device_of_today_is_computed_together(given: dict[str, Any]) -> None:
    assert chosen((8, 0), given) is together
    assert chosen((12, 0), given) is together


@pytest.mark.parametrize("given", UNFITTING.values(), ids=UNFITTING)
def test_what_flash_attention_cannot_do_is_computed_one_by_one(given: dict[str, Any]) -> None:
    assert chosen((9, 0), given) is one_by_one


def test_an_older_device_computes_one_by_one() -> None:
    assert chosen((7, 5), {}) is one_by_one


# --- in models, and among ranks that share a pack ---


def model_result(folder: Path, kernel: Kernel) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of a pack of three samples through one layer of each kind, and the gradients of all parameters."""
    settings = ModelSection(path=str(folder), weights="random", dtype="float32")
    stage = one_of_each(settings, TrainingSection(), CPU)
    config = load_config(str(folder))
    torch.manual_seed(0)
    images = [stage.family.random_images(config, units) for units in (5, 2)]
    text = torch.ones(6, dtype=torch.int64)
    shown = [(torch.cat([text, each.input_ids, text]), each.grids) for each in images]
    tokens = join_samples(stage.family, config, [shown[0], (text[:1], images[0].grids[:0]), shown[1]])
    pixels = torch.cat([each.pixels for each in images])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "kernel_for", lambda *given: kernel)
        logits = stage.head(stage(pack((pixels,), tokens))[0])
    logits.square().sum().backward()
    return logits, [parameter.grad for parameter in stage.parameters() if parameter.grad is not None]


MODELS = {name: name for name in plugins.names(TINY)}


@pytest.mark.parametrize("name", parameters(MODELS, short=("qwen2-5-vl",)))
def test_a_model_computes_the_same_with_both_kernels(name: str, tmp_path: Path) -> None:
    if name == "gemma3":
        pytest.skip("its images are blocks, which one call does not know")
    plugins.load(TINY, name).make(tmp_path)
    (logits, gradients), (expected, wanted) = (model_result(tmp_path, kernel) for kernel in (together, one_by_one))
    torch.testing.assert_close(logits, expected)
    assert len(gradients) == len(wanted) > 0
    for found, each in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(found, each, rtol=1e-4, atol=1e-4)


class Layer(nn.Module):
    sliding_window = 4


def shared_and_alone(case: Case) -> float:
    """The largest difference between this rank's part of the output, and that of the whole pack: also with sinks."""
    rank, degree = distributed.get_rank(), distributed.get_world_size()
    sharing = join_groups([range(degree)], rank)
    samples = PackedSamples(case.lengths)
    part = sharing.share.part(sum(case.lengths))
    query, key, value = tensors(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "varlen_attn", stand_in.varlen_attn)
        patch.setattr(packed, "kernel_for", lambda *given: together)
        own = (each[:, :, part] for each in (query, key, value))
        found, _ = packed_attention(Layer(), next(own), next(own), next(own), None, samples=samples, sharing=sharing)
        patch.setattr(packed, "kernel_for", lambda *given: one_by_one)
        expected, _ = packed_attention(Layer(), query, key, value, None, samples=samples)
    sinks = torch.arange(4.0)
    own = (each[:, :, part] for each in (query, key, value))
    sunk, _ = packed_attention(
        Layer(), next(own), next(own), next(own), None, samples=samples, sharing=sharing, s_aux=sinks
    )
    whole, _ = packed_attention(Layer(), query, key, value, None, samples=samples, s_aux=sinks)
    return max(float((one - all_[:, part]).abs().max()) for one, all_ in ((found, expected), (sunk, whole)))


def of_group(cases: Sequence[Case], rendezvous: str) -> list[float]:
    with process_group(
        int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]), rendezvous
    ):
        return [shared_and_alone(case) for case in cases]


@pytest.mark.ranks
def test_ranks_that_share_a_pack_compute_their_heads_together(tmp_path: Path) -> None:
    cases = (Case(), Case(heads=(4, 1)))
    for differences in on_ranks(of_group, cases, file_rendezvous(tmp_path / "rendezvous")):
        assert max(differences) < 1e-5
