"""Jobs on simulated machines: what a search sees of the machine is its profile and the answers to trials."""

from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from autotune.prediction.predictor import Predictor
from autotune.search.solver.solver import Solver
from autotune.search.space.feasible import feasible_space
from autotune.search.space.space import Space
from benchmarks.cases.solver import INTERN_LM2_2B, INTERN_LM2_7B, INTERN_VIT_300M, lengths
from benchmarks.cases.workloads import SimulatedWorkload
from benchmarks.machines.analytic import A100, LanguageShape, VisionShape, analytic_costs
from benchmarks.machines.decoding import Decoding, drawn_decoding
from benchmarks.machines.dials import Dials, drawn_dials
from benchmarks.machines.kernels import Kernels, drawn_device
from benchmarks.machines.layers import layer_works
from benchmarks.machines.links import drawn_network
from benchmarks.machines.machine import EpochOf, Machine
from benchmarks.machines.profiling import distorted, profiled
from tests.machines.simulated import Behaviour, SimulatedLauncher
from trials.costs.layer_costs import LayerCosts
from trials.data.index import DatasetIndex, profile
from trials.job import SpaceSection
from trials.plan import Plan

DEVELOPMENT = range(40)
"""Seeds of the machines on which the search may be tuned."""
HELD_OUT = range(100, 120)
"""Seeds of the machines by which it is judged."""
_MODELS = {
    "100M + 1B": (
        VisionShape(layers=12, hidden=768, mlp=3072, tokens=1025, image_tokens=256),
        LanguageShape(layers=16, hidden=2048, mlp=5632, heads=16, key_heads=8, vocabulary=92_553),
    ),
    "half of 300M + 2B": (replace(INTERN_VIT_300M, layers=12), replace(INTERN_LM2_2B, layers=12)),
    "half of 300M + 7B": (replace(INTERN_VIT_300M, layers=12), replace(INTERN_LM2_7B, layers=16)),
}
"""With half of the layers, a search takes a third of the time."""
_SPACE = SpaceSection(sequence=("1",), packers=("best-fit", "isf"), qv_slack=(0, 1), qt_slack=(64, 0, 256))
_DATA = ("tiles up to 5", "text and tiles", "many tiles", "single tiles", "long text")
_DEVICES = (4, 8, 16)
_ROOMS = (0.1, 0.4, 0.9)
_SAMPLES_PER_DEVICE, _STEPS = 12, 6
_DECODED_TOGETHER = 4
"""Samples of the packs by whose passes the time of decoding is scaled."""
FORMS: dict[str, dict[str, float]] = {"plain": {}, "stalls": {"decoding": 1.0}, "memory": {"memory": 1.0}}
"""Dials of forms that the other dials are the same for."""


@dataclass(frozen=True, kw_only=True)
class MachineJob(SimulatedWorkload):
    """A job on one of these machines."""

    dials: Dials

    @property
    def batch(self) -> int:
        return _SAMPLES_PER_DEVICE * self.devices

    @cached_property
    def index(self) -> DatasetIndex:
        return lengths(self.data, self.seed, _STEPS * self.batch)

    @cached_property
    def epochs(self) -> EpochOf:
        """Epochs by packing and data ranks, which are the same for the machine and for every predictor."""
        return cache(self.epoch)

    @cached_property
    def machine(self) -> Machine:
        return Machine(
            layer_works(self.vision, self.language),
            self.devices,
            self.epochs,
            self.truth,
            device=drawn_device(self.seed),
            network=drawn_network(self.seed),
            dials=self.dials,
            seed=self.seed,
            decoding=self._decoding,
        )

    @cached_property
    def _decoding(self) -> Decoding | None:
        if not self.dials.decoding:
            return None
        index, works = self.index, layer_works(self.vision, self.language)
        kernels = Kernels(drawn_device(self.seed), self.dials)
        lengths = index.text_tokens.astype(np.float64)
        samples = np.stack([index.vision_units, lengths, lengths**2, index.target_tokens], axis=1)
        packs = np.add.reduceat(samples, range(0, len(samples), _DECODED_TOGETHER))
        layers = {"vision": self.vision.layers, "language": self.language.layers}
        seconds = 0.0
        for kind, work in works.items():
            of_layer = kernels.layer(work, packs)
            seconds += layers.get(kind, 1) * float((of_layer.forward + of_layer.backward).sum())
        return drawn_decoding(self.seed, index, seconds / self.devices, self.dials.decoding)

    @cached_property
    def right_costs(self) -> LayerCosts:
        """Costs of a profile of the machine that is as good as the product's fit."""
        return profiled(self.machine, self._bytes, profile(self.index), self.shape, self.index)

    @cached_property
    def costs(self) -> LayerCosts:
        """Costs as the profile gives them."""
        seen = profiled(self.machine, self._bytes, profile(self.index), self.shape, self.index, sees_all=False)
        return distorted(seen, self.dials, self.seed)

    @cached_property
    def predictor(self) -> Predictor:
        return Predictor(self.costs, self.epochs, 2)

    @cached_property
    def truth(self) -> Predictor:
        """Predictor of the bytes of plans; its times are not those of the machine."""
        return Predictor(self._bytes, self.epochs, 2)

    @cached_property
    def _bytes(self) -> LayerCosts:
        return analytic_costs(self.vision, self.language, A100)

    def space(self, predictor: Predictor) -> Space:
        solver = Solver(predictor, self.limits(self.memory_limit_bytes))
        return feasible_space(self.workload, solver, remedy="", wanted=_SPACE)

    def launcher(self, behaviour: Behaviour, seed: int) -> SimulatedLauncher:
        """Return the machine with this noise and drift; the error of each plan's own is a dial of the machine."""
        return SimulatedLauncher(self.machine, replace(behaviour, plan_width=0.0), seed)

    def fits(self, plan: Plan) -> bool:
        steps = range(self.epochs(plan.packing, plan.layout.data).steps)
        return max(self.machine.peaks(plan, steps)) <= self.memory_limit_bytes

    @property
    def best_seconds(self) -> float:
        raise AttributeError("the best plan of a machine is known only after all searches")


def machine_job(seed: int, level: float, form: str = "plain") -> MachineJob:
    """Return the job of a seed, whose machine has dials around the level, and those of one of FORMS."""
    # Models, data, devices and memory take turns, so that machines for tuning and for judging are of the same kinds.
    model, data = list(_MODELS)[seed % len(_MODELS)], _DATA[seed % len(_DATA)]
    devices, room = _DEVICES[seed // 2 % len(_DEVICES)], _ROOMS[seed // 3 % len(_ROOMS)]
    vision, language = _MODELS[model]
    return MachineJob(
        name=f"{seed}: {model}, {data}, {devices} devices, room {room:.0%}",
        vision=vision,
        language=language,
        tensor=1,
        data=data,
        devices=devices,
        room=room,
        seed=seed,
        dials=replace(drawn_dials(level, seed), **FORMS[form]),
    )
