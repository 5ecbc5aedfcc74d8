"""Layers that offload what they keep, or recompute it selectively: gradients are those of kept layers, bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.contracts.test_families import TINY
from tests.values.parameters import parameters
from trials import plugins
from trials.data.tokens import pack
from trials.engine.memory import SavedTensorMeter
from trials.job import LoraSection, TrainingSection
from trials.model.cut import cut
from trials.model.ends.head_loss import targets_of
from trials.model.family import join_samples
from trials.model.skeleton import build_skeleton, load_config
from trials.model.stage import StageModule
from trials.model.trained import choose_trained, draw_trained
from trials.model.weights import draw_buffers, draw_weights
from trials.offload.offloading import Offloading
from trials.offload.transfers import Transfers
from trials.plan import Layout, Offload, Packed, Plan
from trials.stage import Stage

CPU = torch.device("cpu")
GARBAGE = 0x7F
NAMES = plugins.names(TINY)
SHORT = ("qwen3-vl-moe", "gemma3")
"""Experts and inner features, and blocks of image tokens; what does not train is tested on InternVL's tiles."""
PARTS = {
    "vision frozen": TrainingSection(freeze=("vision",)),
    "language frozen": TrainingSection(freeze=("language",)),
    "LoRA": TrainingSection(lora=LoraSection(rank=2)),
}
FREED: dict[str, dict[str, Any]] = {"offload": {"offload": "both"}, "selective": {"freed": "selective"}}


class Late(Transfers):
    """Copies that are made only when their end is awaited, in their order, as a slow stream of its own might.

    What is not awaited before it is used or freed is garbage.
    """

    def __init__(self) -> None:
        super().__init__(CPU)
        self._pending: list[tuple[int, torch.Tensor, ref[torch.Tensor]]] = []
        self.copies = self.copied_bytes = self._lost = 0

    @property
    def lost(self) -> int:
        """The copies whose source was freed before their end was awaited."""
        return self._lost + sum(source() is None for *_, source in self._pending)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        self.copies += 1
        self.copied_bytes += source.numel()
        target.fill_(GARBAGE)
        self._pending.append((self.copies, target, ref(source)))
        return self.copies

    def await_end(self, done: Any) -> None:
        while self._pending and self._pending[0][0] <= done:
            _, target, source = self._pending.pop(0)
            found = source()
            if found is None:
                self._lost += 1
            else:
                target.copy_(found)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def made(name: str) -> Path:
        folder: Path = tmp_path_factory.mktemp(name)
        plugins.load(TINY, name).make(folder)
        return folder

    return made


class Result(NamedTuple):
    """Two packs in flight: losses, gradients by name, (kept, peak, left) bytes by the meter, and copies."""

    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    live_bytes: tuple[int, int, int]
    copies: int


def step(
    folder: Path, training: TrainingSection, share: float = 0, offload: Offload = "none", freed: str = "recompute"
) -> Result:
    """Two packs in flight, with this share of the layers freed: offloaded, else recomputed or `selective`."""
    transfers = Late()
    skeleton = build_skeleton(load_config(str(folder)), torch.float32)
    choose_trained(skeleton, training)
    vision, language = len(skeleton.chain.vision_layers), len(skeleton.chain.language_layers)
    counts: dict[str, Any] = {f"{freed}_vision": round(share * vision), f"{freed}_language": round(share * language)}
    plan = Plan(
        packing=Packed(qv=10, qt=10_000, qv_min=0, qt_min=0),
        layout=Layout(pipeline=1, data=1, zero=0, offload=offload),
        stages=(replace(Stage(vision=vision, language=language), **counts),),
    )
    stage = StageModule(skeleton, cut(plan)[0])
    draw_weights(stage.model, stage.paths, 0, CPU)
    draw_trained(stage.model, stage.paths, training)
    draw_buffers(stage.model, stage.chain.buffers, CPU)
    stage.tie()
    if offload != "none":
        stage.offloading = Offloading(transfers, least_bytes=1)
    packs = [inputs_of(stage, folder, units) for units in (5, 2)]
    meter = SavedTensorMeter(list(stage.parameters()), 0, 1 << 62)
    with meter.watch():
        losses = [stage(inputs, targets) for inputs, targets in packs]
        kept = meter.live_bytes
        for loss in losses:
            loss.backward()
    assert not transfers.lost
    gradients = {name: each.grad for name, each in stage.named_parameters() if each.requires_grad}
    losses = [loss.detach() for loss in losses]
    return Result(losses, gradients, (kept, meter.peak_bytes, meter.live_bytes), transfers.copies)


def inputs_of(stage: StageModule, folder: Path, units: int) -> tuple[Any, Any]:
    config = load_config(str(folder))
    torch.manual_seed(units)
    images = [stage.family.random_images(config, each) for each in (units, 1)]
    text = torch.ones(6, dtype=torch.int64)
    samples = [(torch.cat([text, each.input_ids, text]), each.grids) for each in images]
    tokens = join_samples(stage.family, config, samples)
    labels = torch.ones_like(tokens.input_ids)
    floats, integers = pack((torch.cat([each.pixels for each in images]),), tokens)
    return (floats, integers), targets_of(labels, torch.full((), 0.5))


def check(usual: Result, found: Result) -> None:
    assert all(torch.equal(one, other) for one, other in zip(usual.losses, found.losses, strict=True))
    assert usual.gradients.keys() == found.gradients.keys()
    for name, gradient in usual.gradients.items():
        other = found.gradients[name]
        if gradient is None or other is None:
            assert gradient is other, name
        else:
            assert torch.equal(gradient, other), name


@pytest.mark.parametrize("name", parameters({name: name for name in NAMES}, short=SHORT))
def test_gradients_are_those_of_kept_layers(name: str, folder_of: Callable[[str], Path]) -> None:
    usual = step(folder_of(name), TrainingSection())
    for share in (0.5, 1.0):
        offloading = step(folder_of(name), TrainingSection(), share, offload="both")
        check(usual, offloading)
        assert offloading.copies
        selective = step(folder_of(name), TrainingSection(), share, freed="selective")
        check(usual, selective)
        kept, peak, left = selective.live_bytes
        assert kept < usual.live_bytes[0]
        assert kept <= peak <= usual.live_bytes[1]
        assert not left


@pytest.mark.parametrize("offload", ["vision", pytest.param("language", marks=pytest.mark.long)])
def test_one_tower_offloads_while_the_other_recomputes(offload: Offload, folder_of: Callable[[str], Path]) -> None:
    found = step(folder_of("internvl"), TrainingSection(), 1.0, offload=offload)
    check(step(folder_of("internvl"), TrainingSection()), found)
    assert found.copies


@pytest.mark.parametrize(
    ("training", "freed"),
    parameters(
        {f"{part}, {way}": (PARTS[part], FREED[way]) for part in PARTS for way in FREED},
        short=("vision frozen, selective", "LoRA, offload"),
    ),
)
def test_parts_that_do_not_train(
    training: TrainingSection, freed: dict[str, Any], folder_of: Callable[[str], Path]
) -> None:
    check(step(folder_of("internvl"), training), step(folder_of("internvl"), training, 1.0, **freed))


class Counting(Late):
    """Copies that count the bytes of the storages on the device which they read or wrote and which are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._hosts: set[int] = set()
        self._there: dict[int, tuple[StorageWeakRef, int]] = {}

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        done = super().copy(target, source)
        is_leaving = source.untyped_storage()._cdata not in self._hosts
        storage = (source if is_leaving else target).untyped_storage()
        self._there[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(size for held, size in self._there.values() if not held.expired()))
        return done

    def host_bytes(self, size: int) -> torch.Tensor:
        made = super().host_bytes(size)
        self._hosts.add(made.untyped_storage()._cdata)
        return made


def test_two_layers_are_on_the_device_at_most_with_several_packs_in_flight() -> None:
    transfers = Counting()
    offloading = Offloading(transfers, least_bytes=1)
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)]

    def forward() -> torch.Tensor:
        offloading.begin_pack()
        # Not a leaf, which autograd would hold.
        states = torch.randn(32, 64, requires_grad=True) + 0
        for layer in layers:
            states = offloading.run(layer, layer, states)
        offloading.end_pack(states)
        return states

    first, second = forward(), forward()
    of_layer = transfers.copied_bytes // (2 * len(layers))
    assert of_layer == 2 * 32 * 64 * 4
    first.sum().backward()
    second.sum().backward()
    assert transfers.copied_bytes > 3 * len(layers) * of_layer
    assert transfers.most <= 2 * of_layer
