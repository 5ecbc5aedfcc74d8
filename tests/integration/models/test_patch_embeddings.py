"""Patch embeddings that multiply patches, compared with the convolutions that they are saved as."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from tests.contracts.test_families import CPU, TINY, tokens_of
from tests.machines.own_ranks import on_ranks
from tests.machines.reference_convolutions import roundings_allowed
from tests.values.parameters import parameters
from trials import plugins
from trials.engine.memory import SavedTensorMeter
from trials.model.ends.patches import embed_by_matrix
from trials.model.paths import parameters_at
from trials.model.plain.small_copy import relative_difference
from trials.model.skeleton import Skeleton, build_skeleton, load_config
from trials.model.weights import draw_buffers, draw_weights

UNITS = 6
FLOOR = 1e-30
"""For values that are all 0, or none at all."""
WITHIN = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
FAMILIES = [name for name in plugins.names(TINY) if not name.startswith("text") and name != "glm4v-moe"]
"""Without GLM-4.5V, which needs float32, and has the vision tower of GLM-4.1V."""
dtypes = pytest.mark.parametrize("dtype", WITHIN, ids=str)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """What one pass gives, and what it keeps for its backward pass."""

    output: torch.Tensor
    gradients: dict[str, torch.Tensor]
    kept_bytes: int
    convolutions: int


class Convolutions(TorchDispatchMode):
    """Counts the convolutions that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "convolution" in str(function)
        return function(*args, **(kwargs or {}))


def result(run: Any, leaves: Mapping[str, torch.Tensor], weights: Sequence[torch.Tensor]) -> Found:
    """Both passes of `run`, with the gradients of the leaves."""
    meter = SavedTensorMeter(weights, 0, 1 << 40)
    with Convolutions() as convolutions:
        with meter.watch():
            output = run()
        kept_bytes = meter.live_bytes
        torch.manual_seed(1)
        gradients = torch.autograd.grad(output, list(leaves.values()), torch.randn(output.shape, dtype=output.dtype))
    return Found(
        output=output.detach(),
        gradients=dict(zip(leaves, gradients, strict=True)),
        kept_bytes=kept_bytes,
        convolutions=convolutions.count,
    )


def compare(found: Found, expected: Found, within: float) -> None:
    assert (found.convolutions, expected.convolutions) == (0, 2)
    assert found.output.shape == expected.output.shape
    assert found.output.dtype == expected.output.dtype
    assert relative_difference(found.output.float(), expected.output.float(), FLOOR) <= within
    for name, gradient in expected.gradients.items():
        assert found.gradients[name].shape == gradient.shape
        assert relative_difference(found.gradients[name].float(), gradient.float(), FLOOR) <= within, name


@contextmanager
def as_saved(model: PreTrainedModel, plain: PreTrainedModel) -> Iterator[None]:
    """The modules compute as the class says that transformers gives them."""
    ours = {path: type(module) for path, module in model.named_modules()}
    try:
        for path, module in model.named_modules():
            module.__class__ = type(plain.get_submodule(path))
        yield
    finally:
        for path, module in model.named_modules():
            module.__class__ = ours[path]


def drawn(folder: Path, dtype: torch.dtype) -> Skeleton:
    skeleton = build_skeleton(load_config(str(folder)), dtype)
    draw_weights(skeleton.model, skeleton.chain.vision_embedding, 0, CPU)
    draw_buffers(skeleton.model, skeleton.chain.buffers, CPU)
    return skeleton


@pytest.mark.parametrize(
    ("name", "dtype"),
    parameters(
        {f"{name}, {dtype}": (name, dtype) for name in FAMILIES for dtype in WITHIN},
        short=("internvl, torch.float32", "pixtral, torch.float32", "qwen2-5-vl, torch.bfloat16"),
    ),
)
def test_the_embedding_of_every_family_runs_no_convolution_and_gives_what_it_would(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    plugins.load(TINY, name).make(tmp_path)
    skeleton = drawn(tmp_path, dtype)
    model, family = skeleton.model, skeleton.family
    with torch.device("meta"):
        plain = family.AUTO_MODEL.from_config(load_config(str(tmp_path)), dtype=dtype)
    torch.manual_seed(0)
    images = family.random_images(model.config, UNITS)
    tokens = tokens_of(family, model.config, images)
    leaves = {
        name: parameter
        for path in skeleton.chain.vision_embedding
        for name, parameter in parameters_at(skeleton.model, path)
        if "mask_token" not in name
    }

    def embed() -> torch.Tensor:
        return family.embed_vision(model, images.pixels, tokens)

    found = result(embed, leaves, list(leaves.values()))
    with as_saved(model, plain):
        expected = result(embed, leaves, list(leaves.values()))
    compare(found, expected, WITHIN[dtype])
    assert found.kept_bytes <= expected.kept_bytes
    shapes, wanted = ({name: each.shape for name, each in m.state_dict().items()} for m in (model, plain))
    assert shapes == wanted


CASES: dict[str, tuple[type[_ConvNd], dict[str, Any], tuple[int, ...]]] = {
    "whole images": (nn.Conv2d, {"kernel_size": 4}, (2, 3, 12, 20)),
    "one patch in each image": (nn.Conv2d, {"kernel_size": 4}, (5, 3, 4, 4)),
    "more than whole patches": (nn.Conv2d, {"kernel_size": (4, 3)}, (2, 3, 15, 11)),
    "one image alone": (nn.Conv2d, {"kernel_size": 4}, (3, 8, 9)),
    "no image": (nn.Conv2d, {"kernel_size": 4}, (0, 3, 8, 8)),
    "single pixels": (nn.Conv2d, {"kernel_size": 1}, (2, 3, 4, 5)),
    "no bias": (nn.Conv2d, {"kernel_size": 4, "bias": False}, (2, 3, 8, 8)),
    "named padding": (nn.Conv2d, {"kernel_size": 4, "padding": "valid"}, (2, 3, 8, 9)),
    "channels last": (nn.Conv2d, {"kernel_size": 4}, (2, 3, 8, 8)),
    "one patch of frames": (nn.Conv3d, {"kernel_size": (2, 4, 4), "bias": False}, (6, 3, 2, 4, 4)),
    "patches of frames": (nn.Conv3d, {"kernel_size": (2, 4, 3)}, (2, 3, 5, 9, 11)),
    "frames alone": (nn.Conv3d, {"kernel_size": (2, 4, 4)}, (3, 4, 8, 8)),
}


@dtypes
@pytest.mark.parametrize("case", CASES)
def test_patches_give_the_output_and_gradients_of_the_convolution(case: str, dtype: torch.dtype) -> None:
    kind, options, shape = CASES[case]
    torch.manual_seed(0)
    module: Any = kind(3, 16, stride=options["kernel_size"], dtype=dtype, **options)
    pixels = torch.randn(shape, dtype=dtype)
    if case == "channels last":
        pixels = pixels.to(memory_format=torch.channels_last)
    leaves = {"pixels": pixels.requires_grad_(), **dict(module.named_parameters())}
    expected = result(lambda: module(pixels), leaves, list(module.parameters()))
    embed_by_matrix(module)
    found = result(lambda: module(pixels), leaves, list(module.parameters()))
    compare(found, expected, WITHIN[dtype])


def test_patches_of_frozen_pixels_keep_no_more_than_the_convolution_for_the_backward_pass() -> None:
    module: Any = nn.Conv2d(3, 16, 4, stride=4)
    weights, pixels = dict(module.named_parameters()), torch.randn(2, 3, 13, 16)
    usual = result(lambda: module(pixels), weights, list(module.parameters()))
    embed_by_matrix(module)
    found = result(lambda: module(pixels), weights, list(module.parameters()))
    assert found.kept_bytes == usual.kept_bytes // 13 * 12  # what is beyond whole patches is not kept
    for weight in module.parameters():
        weight.requires_grad_(False)
    meter = SavedTensorMeter(list(module.parameters()), 0, 1 << 40)
    with meter.watch():
        module(pixels)
    assert meter.live_bytes == 0


class Own(nn.Conv2d):
    """A class of its own, which may compute something else."""


OTHERS: dict[str, nn.Module] = {
    "patches overlap": nn.Conv2d(6, 12, 4, stride=2),
    "patches leave gaps": nn.Conv2d(6, 12, 4, stride=5),
    "images are padded": nn.Conv2d(6, 12, 4, stride=4, padding=1),
    "pixels are left out": nn.Conv2d(6, 12, 4, stride=4, dilation=2),
    "channels come in groups": nn.Conv2d(6, 12, 4, stride=4, groups=2),
    "one dimension overlaps": nn.Conv3d(6, 12, (2, 4, 4), stride=(1, 4, 4)),
    "a class of its own": Own(6, 12, 4, stride=4),
    "text": nn.Conv1d(6, 12, 4, stride=4),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_convolution_of_other_values_than_patches_stays_as_it_is(case: str) -> None:
    kind = type(OTHERS[case])
    embed_by_matrix(OTHERS[case])
    assert type(OTHERS[case]) is kind


@pytest.mark.parametrize("shape", [(2, 3, 3, 8), (2, 4, 8, 8)], ids=["too small", "other channels"])
def test_images_that_the_convolution_refuses_are_refused(shape: tuple[int, ...]) -> None:
    module = nn.Conv2d(3, 16, 4, stride=4)
    embed_by_matrix(module)
    with pytest.raises(RuntimeError, match=r"[Kk]ernel size|shapes cannot be multiplied"):
        module(torch.randn(shape))


@pytest.mark.ranks
def test_convolutions_of_a_certificate_s_reference_are_not_rounded_where_products_are_not(tmp_path: Path) -> None:
    plugins.load(TINY, "internvl").make(tmp_path / "model")
    assert on_ranks(roundings_allowed, tmp_path, world_size=1) == [([False, False], True)]
