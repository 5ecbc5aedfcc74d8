"""Problems for the solver: synthetic lengths, models of analytic cost, and memory from tight to tighter."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from autotune.prediction.predictor import Predictor
from autotune.search.solver.limits import HEADROOM, Limits
from autotune.search.solver.solver import Solver
from benchmarks.cases.lengths import index_of
from benchmarks.machines.analytic import A100, LanguageShape, VisionShape, analytic_costs, without_selective
from benchmarks.packing import WEIGHTS
from trials.data.epoch import Epoch, EpochSettings, build_epoch
from trials.data.index import DatasetIndex
from trials.plan import Layout, Packed, Packing

INTERN_VIT_6B = VisionShape(layers=45, hidden=3200, mlp=12_800, tokens=1025, image_tokens=256)
INTERN_VIT_300M = VisionShape(layers=24, hidden=1024, mlp=4096, tokens=1025, image_tokens=256)
INTERN_LM2_20B = LanguageShape(layers=48, hidden=6144, mlp=16_384, heads=48, key_heads=8, vocabulary=92_544)
INTERN_LM2_7B = LanguageShape(layers=32, hidden=4096, mlp=14_336, heads=32, key_heads=8, vocabulary=92_553)
INTERN_LM2_2B = LanguageShape(layers=24, hidden=2048, mlp=8192, heads=16, key_heads=8, vocabulary=92_553)
"""Published shapes of InternVL's parts."""

EQUAL = "three tiles each"
_SAMPLES, _EQUAL_SAMPLES = 2000, 960
_TILE_TOKENS = 256
_DATA = {
    # Shares of samples by number of tiles, and mean text tokens of a sample without those of its tiles.
    "tiles up to 5": ({0: 0.15, 1: 0.25, 3: 0.15, 5: 0.45}, 150),
    "text and tiles": ({0: 0.4, 1: 0.2, 2: 0.1, 5: 0.2, 7: 0.1}, 400),
    "many tiles": ({1: 0.2, 4: 0.2, 7: 0.3, 13: 0.3}, 120),
    "single tiles": ({1: 1.0}, 250),
    "long text": ({0: 0.5, 1: 0.3, 2: 0.2}, 900),
}

_CAPACITIES = {"tiles up to 5": (9, 4096), "text and tiles": (12, 4096), "many tiles": (20, 6144)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem."""

    name: str
    vision: VisionShape
    language: LanguageShape
    tensor: int
    """Tensor degree, folded into the costs of the layers."""
    data: str
    packing: Packing
    layout: Layout
    micro_batches: int
    room: float
    """Memory between what the leanest plan needs (0) and what the same needs with nothing recomputed (1)."""
    selective: bool = False
    """Whether layers can be recomputed selectively too, which no other solver does."""

    def predictor(self) -> Predictor:
        costs = analytic_costs(self.vision, self.language, A100, self.tensor)
        costs = costs if self.selective else without_selective(costs)
        index = lengths(self.data, seed=len(self.name))
        return Predictor(costs, lambda packing, data: _epoch(index, packing, data, self.micro_batches), 2)

    def limits(self, memory_limit_bytes: int) -> Limits:
        return Limits(
            vision_layers=self.vision.layers,
            language_layers=self.language.layers,
            memory_limit_bytes=memory_limit_bytes,
        )

    def solver(self, predictor: Predictor) -> Solver:
        return Solver(predictor, self.tight_limits(predictor))

    def tight_limits(self, predictor: Predictor) -> Limits:
        roomy = Solver(predictor, self.limits(1 << 60))
        least = roomy.least_bytes(self.packing, self.layout)
        kept = roomy.solve(self.packing, self.layout)
        assert kept is not None
        most = max(predictor.predict(kept).stage_bytes)
        return self.limits(round((least + self.room * max(most - least, 0)) / HEADROOM))


def cases() -> Iterator[Case]:
    """Yield 24 problems: three models, three kinds of data, 2 to 8 stages, and memory that asks for recomputation."""
    models = (
        ("6B+20B", INTERN_VIT_6B, INTERN_LM2_20B, 4, ((4, 32), (4, 8), (8, 16))),
        ("300M+7B", INTERN_VIT_300M, INTERN_LM2_7B, 1, ((4, 16), (2, 8), (3, 6))),
        ("300M+2B", INTERN_VIT_300M, INTERN_LM2_2B, 1, ((2, 16), (4, 12))),
    )
    for model, vision, language, tensor, pipelines in models:
        for stages, micro_batches in pipelines:
            for (data, (qv, qt)), room in zip(_CAPACITIES.items(), (0.1, 0.3, 0.6), strict=True):
                yield Case(
                    name=f"{model}, {stages} stages, {micro_batches} micro-batches, {data}",
                    vision=vision,
                    language=language,
                    tensor=tensor,
                    data=data,
                    packing=Packed(qv=qv, qt=qt, qv_min=qv, qt_min=qt - 128, packer="best-fit"),
                    layout=Layout(pipeline=stages, data=1 if stages == 8 else 2, zero=1),
                    micro_batches=micro_batches,
                    room=room,
                )


def speed_cases() -> Iterator[tuple[str, Case]]:
    """Yield (size, problem), each with memory from tight to looser."""
    small = next(cases())
    large = replace(
        small,
        vision=replace(INTERN_VIT_6B, layers=90),
        language=replace(INTERN_LM2_20B, layers=110),
        layout=Layout(pipeline=32, data=1, zero=1),
        micro_batches=64,
    )
    for size, case in (("45 + 48 layers, 4 stages", small), ("90 + 110 layers, 32 stages", large)):
        for room in (0.1, 0.3, 0.6):
            yield size, replace(case, name=f"{size}, room {room:.0%}", room=room, selective=True)


def paper_case(packs: int) -> Case:
    """Return OmniBal's setting: steps of equal packs of 9 tiles and 4,095 tokens, which 3 samples fill."""
    return Case(
        name="InternViT-6B + InternLM2-20B, tensor degree 4, 4 stages",
        vision=INTERN_VIT_6B,
        language=INTERN_LM2_20B,
        tensor=4,
        data=EQUAL,
        packing=Packed(qv=9, qt=4096, qv_min=9, qt_min=4096 - 128, packer="best-fit"),
        layout=Layout(pipeline=4, data=1, zero=1),
        micro_batches=packs,
        room=1.0,
    )


def lengths(data: str, seed: int, samples: int = _SAMPLES) -> DatasetIndex:
    """Return samples of random lengths, or all alike."""
    if data == EQUAL:
        return index_of(np.full(_EQUAL_SAMPLES, 3), np.full(_EQUAL_SAMPLES, 1365))
    shares, mean = _DATA[data]
    random = np.random.default_rng(seed)
    units = random.choice(list(shares), size=samples, p=list(shares.values()))
    text = np.minimum(random.lognormal(np.log(mean), 0.8, samples), 2000).astype(np.int64)
    return index_of(units, units * _TILE_TOKENS + text + 1)


def _epoch(index: DatasetIndex, packing: Packing, ranks: int, micro_batches: int) -> Epoch:
    """Return an epoch whose global batch takes `micro_batches` micro-batches."""

    def build(batch: int) -> Epoch:
        return build_epoch(
            index, packing, EpochSettings(global_batch_samples=batch, weights=WEIGHTS), data_parallel=ranks
        )

    return build(round(micro_batches * len(index) / len(build(1).assignment)))
