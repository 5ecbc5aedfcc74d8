"""Layers that offload what they keep: loss and gradients are those of layers that keep it, bit for bit."""

from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.contracts.test_families import TINY
from tests.values.parameters import parameters
from trials import plugins
from trials.data.tokens import pack
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
from trials.plan import Layout, Offload, Packed, Plan, Stage

CPU = torch.device("cpu")
GARBAGE = 0x7F
NAMES = plugins.names(TINY)
SHORT = ("internvl", "qwen2-5-vl", "qwen3-vl-moe", "gemma3")


class Late(Transfers):
    """Copies that are made only when their end is awaited, in their order, as a slow stream of its own might.

    What is not awaited before it is used or freed is garbage.
    """

    def __init__(self) -> None:
        super().__init__(CPU)
        self._pending: list[tuple[int, torch.Tensor, ref[torch.Tensor]]] = []
        self.copies = self.copied_bytes = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        self.copies += 1
        self.copied_bytes += source.numel()
        target.fill_(GARBAGE)
        self._pending.append((self.copies, target, ref(source)))
        return self.copies

    def await_end(self, done: Any) -> None:
        while self._pending and self._pending[0][0] <= done:
            _, target, source = self._pending.pop(0)
            if (found := source()) is not None:
                target.copy_(found)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in NAMES}
    for name, folder in made.items():
        plugins.load(TINY, name).make(folder)
    return made


def step(folder: Path, training: TrainingSection, offload: Offload | None, share: float) -> tuple[Any, Late]:
    """The loss and gradients of two packs in flight, with this share of the layers offloaded; None keeps all."""
    transfers = Late()
    skeleton = build_skeleton(load_config(str(folder)), torch.float32)
    choose_trained(skeleton, training)
    vision, language = len(skeleton.chain.vision_layers), len(skeleton.chain.language_layers)
    freed = 0 if offload is None else share
    plan = Plan(
        packing=Packed(qv=10, qt=10_000, qv_min=0, qt_min=0),
        layout=Layout(pipeline=1, data=1, zero=0, offload=offload or "none"),
        stages=(
            Stage(
                vision=vision,
                language=language,
                recompute_vision=round(freed * vision),
                recompute_language=round(freed * language),
            ),
        ),
    )
    stage = StageModule(skeleton, cut(plan)[0])
    draw_weights(stage.model, stage.paths, 0, CPU)
    draw_trained(stage.model, stage.paths, training)
    draw_buffers(stage.model, stage.chain.buffers, CPU)
    stage.tie()
    if offload is not None:
        stage.offloading = Offloading(transfers, least_bytes=1)
    losses = [stage(inputs, targets) for inputs, targets in (inputs_of(stage, folder, units) for units in (5, 2))]
    for loss in losses:
        loss.backward()
    gradients = {name: each.grad for name, each in stage.named_parameters() if each.requires_grad}
    return (losses, gradients), transfers


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


def check(folder: Path, offload: Offload, share: float, training: TrainingSection | None = None) -> None:
    training = training or TrainingSection()
    (losses, gradients), _ = step(folder, training, None, 0)
    (found, found_gradients), transfers = step(folder, training, offload, share)
    assert all(torch.equal(one, other) for one, other in zip(losses, found, strict=True))
    assert gradients.keys() == found_gradients.keys()
    for name, gradient in gradients.items():
        other = found_gradients[name]
        assert (gradient is None and other is None) or torch.equal(gradient, other), name
    assert transfers.copies


@pytest.mark.parametrize("name", parameters({name: name for name in NAMES}, short=SHORT))
@pytest.mark.parametrize("share", parameters({"half": 0.5, "all": 1.0}, short=("all",)))
def test_gradients_are_those_of_kept_layers(name: str, share: float, folders: dict[str, Path]) -> None:
    check(folders[name], "both", share)


@pytest.mark.parametrize("offload", ["vision", pytest.param("language", marks=pytest.mark.long)])
def test_one_tower_offloads_while_the_other_recomputes(offload: Offload, folders: dict[str, Path]) -> None:
    check(folders["internvl"], offload, 1.0)


@pytest.mark.parametrize(
    "training",
    [
        TrainingSection(freeze=("vision",)),
        TrainingSection(freeze=("language",)),
        TrainingSection(lora=LoraSection(rank=2)),
    ],
    ids=["vision frozen", "language frozen", "LoRA"],
)
def test_parts_that_do_not_train(training: TrainingSection, folders: dict[str, Path]) -> None:
    check(folders["internvl"], "both", 1.0, training)


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
