"""Costs of the layers of a model on devices that are not here, from their data sheet."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from autotune.advice.data_sheets import DataSheet
from autotune.advice.operations import LINK_SHARE, MEMORY_SHARE, META, SheetProfiler
from autotune.errors import RecommendError
from autotune.prediction.fit.costs import fit_costs
from trials.costs.coefficients import KINDS, NOTHING
from trials.costs.exchange import Exchange
from trials.costs.layer_costs import LayerCosts, UpdateCost
from trials.job import ModelSection, TrainingSection
from trials.model.paths import allocate
from trials.tasks.answer import CommunicationTiming, UpdateTiming
from trials.tasks.profiling.layer_profile import report_of_layers
from trials.tasks.profiling.one_of_each import OneOfEach, one_of_each
from trials.tasks.request import ProbeSizes

DEVICES_OF_NODE = 8
LATENCY_SECONDS = 2e-5
"""Of a message, a choice: some launches of kernels."""
_UPDATE_BYTES = 30
"""Bytes that AdamW moves for a parameter: float32 weight and two moments both ways, gradient in, 16-bit weight out."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SheetCosts:
    """Costs of a model's layers on devices of one kind."""

    sheet: DataSheet
    element_bytes: int
    layers: LayerCosts
    """Costs on one device."""

    @classmethod
    def of(cls, sheet: DataSheet, model: ModelSection, training: TrainingSection, sizes: ProbeSizes) -> "SheetCosts":
        """Run one layer of each kind without values at these sizes.

        Raise ModelError like `build_skeleton`, and RecommendError for layers that need values.
        """
        stage = allocated_stage(model, training)
        try:
            report = report_of_layers(stage, partial(SheetProfiler, sheet=sheet), sizes)
        except (RuntimeError, NotImplementedError) as error:
            raise RecommendError(
                f"layers of {model.path} in {model.dtype} cannot be computed without a device: {error}; set "
                "model.dtype to bfloat16 if they have experts, or measure them with `autotune profile JOB`"
            ) from error
        seconds = _UPDATE_BYTES / (MEMORY_SHARE * sheet.memory_bytes_per_second)
        layers = fit_costs(
            [
                replace(
                    report,
                    updates=(UpdateTiming(zero=0, data_parallel=1, seconds_per_parameter=seconds),),
                    communications=(
                        CommunicationTiming(pipeline=2, data=1, latency_seconds=LATENCY_SECONDS, seconds_per_byte=0.0),
                    ),
                )
            ]
        )
        return cls(sheet=sheet, element_bytes=stage.model.dtype.itemsize, layers=layers)

    def on(self, devices: int) -> LayerCosts:
        """Return the costs on a number of devices, of which each node has `DEVICES_OF_NODE`."""
        return self.linked(self.layers, devices)

    def linked(self, alone: LayerCosts, devices: int) -> LayerCosts:
        """Return the costs on a number of devices, with layers, updates and copies as on the one that has `alone`."""
        rate = 1 / (LINK_SHARE * self.sheet.link_bytes_per_second)
        if devices > DEVICES_OF_NODE:
            rate = 1 / (LINK_SHARE * self.sheet.network_bytes_per_second)
        return replace(
            alone,
            link=replace(self.layers.link, seconds_per_byte=rate),
            communications=(),
            exchanges=(*alone.exchanges, *self._exchanges(devices, rate)),
            updates=(*alone.updates, *self._updates(alone.updates[0], devices, rate)),
        )

    def _updates(self, alone: UpdateCost, devices: int, rate: float) -> Iterator[UpdateCost]:
        """Yield the update of ZeRO 1 and 2: that of a share of the parameters, and the gathering of all.

        ZeRO 3 gathers weights in the passes.
        """
        if devices > 1:
            gather = rate * (1 - 1 / devices) * self.element_bytes
            seconds = alone.seconds_per_parameter / devices + gather
            yield UpdateCost(zero=1, data_parallel=devices, seconds_per_parameter=seconds)

    def _exchanges(self, devices: int, rate: float) -> Iterator[Exchange]:
        """Yield averages of gradients, and what ranks gather and scatter that hold weights in shards.

        In a ring each rank sends nearly all of its bytes, for an average twice (Patarasuk and Yuan 2009).
        """
        if devices == 1:
            return
        rate *= 1 - 1 / devices
        yield Exchange.of_bytes("average", devices, 0.0, 2 * rate)
        yield Exchange.of_bytes("scatter", devices, 0.0, rate)
        for kind in KINDS:
            seconds = LATENCY_SECONDS + rate * self.element_bytes * self.layers[kind].parameters
            gather = 0.0, 0.0, 0.0, seconds
            # The weights of the head stay for the backward pass, which begins there.
            backward = NOTHING if kind == "head" else gather
            yield Exchange(name="gather", ranks=devices, layer=kind, forward_seconds=gather, backward_seconds=backward)


def allocated_stage(model: ModelSection, training: TrainingSection) -> OneOfEach:
    """Return one layer of each kind on torch's meta device."""
    stage = one_of_each(model, training, META, _allocate)
    module: Any
    for module in stage.model.modules():
        # Other kinds read the longest position, which has no value. Their frequencies have the same shapes.
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            module.rope_type = "default"
        elif isinstance(kind, dict):  # one for each type of layers
            module.rope_type = dict.fromkeys(kind, "default")
    return stage


def _allocate(model: PreTrainedModel, paths: Iterable[str], _: int, __: object) -> None:
    for path in paths:
        allocate(model, path, META)
