"""Whole searches in random spaces, memories and settings: each ends with a winner, or with a refusal in words."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from autotune.errors import NoFeasiblePlan
from storage.store import open_store
from tests.machines import search_bench
from tests.machines.search_bench import Bench
from tests.machines.simulated import Behaviour, SimulatedLauncher
from tests.unit.search.space.test_offloaded_layouts import FAST
from tests.values.parameters import parameters
from tests.values.search import axes_of, predictor_of
from trials.outcome import OutOfMemory
from trials.plan import Layout, Plan

LAYOUTS = (
    Layout(pipeline=2, data=1, zero=0),
    Layout(pipeline=1, data=2, zero=0),
    Layout(pipeline=1, data=2, zero=1),
    Layout(pipeline=2, data=1, zero=0, offload="both"),
)


@pytest.mark.parametrize("seed", parameters({str(seed): seed for seed in range(32)}, short=("3",)))
def test_a_random_search_ends_without_an_error(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(seed)
    predictor = predictor_of(FAST)
    memory = random.choice([14, 16, 18, 20, 24, 30, 40, 1 << 20]) << 20
    monkeypatch.setattr(search_bench, "PREDICTOR", predictor)
    monkeypatch.setattr(search_bench, "MEMORY", memory)
    axes = axes_of(layouts=tuple(random.sample(LAYOUTS, random.randint(1, len(LAYOUTS)))))
    if random.random() < 0.5:
        axes = replace(axes, recompute=random.choice(["fit", "towers", "none"]))
    settings = {
        "trials": random.randint(4, 14),
        "sampler": random.choice(["model", "model", "tpe", "uniform", "gp"]),
        "objectives": random.choice([["time"], ["time", "memory"]]),
    }
    behaviour, share = Behaviour(noise=random.choice([0.0, 0.02, 0.1])), random.choice([1.0, 1.0, 1.0, 1.6])

    def cause(plan: Plan) -> OutOfMemory | None:
        """Let plans need this share of the memory that is predicted."""
        needed = round(share * max(predictor.predict(plan).stage_bytes))
        return OutOfMemory(stage=0, rank=0, needed_bytes=needed, limit_bytes=memory) if needed > memory else None

    pool = SimulatedLauncher(predictor, behaviour, cause_of=cause)
    with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store, suppress(NoFeasiblePlan):
        bench = Bench(tmp_path, store)
        assert bench.search(bench.study(), pool, memory=memory, axes=axes, time_limit="10h", **settings).trials
