"""The plan that is solved within a trainer's limits, next to the best of all plans on a grid within them."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from autotune.exporting.closest import Restricted
from autotune.exporting.trainers import EXPORTS
from autotune.forecast.cluster import ClusterOptions, cluster_of_file
from autotune.forecast.forecast import ForecastData, Forecaster
from autotune.job_file import load_job
from autotune.model_shape import model_shape
from autotune.search.space.abilities import Target
from autotune.search.space.sequential import order_of
from tests.programs.users import JobFile
from tests.values.parameters import parameters
from trials import plugins
from trials.errors import DataError
from trials.plan import MOST_UNITS, Layout, Packed, Packing, Padded, Plan
from trials.stage import Stage

pytestmark = pytest.mark.usefixtures("home")

UNITS = (8, 12, MOST_UNITS)


def packings(target: Target, longest: int) -> Iterator[Packing]:
    """Padded micro-batches of up to 12 samples, and packs of the lengths of a grid, with and without limited units."""
    yield from (Padded(samples=samples) for samples in (1, 2, 3, 4, 6, 8, 12))
    if target.abilities.packs != "none":
        for qt, qv in product(range(longest, 12 * longest, longest // 2), UNITS):
            yield Packed(qv=qv, qt=qt, qv_min=qv, qt_min=qt, packer="best-fit")


def plans(forecaster: Forecaster, target: Target) -> Iterator[Plan]:
    shape, solver = forecaster.shape, forecaster.solver()
    layouts = [Layout(pipeline=1, data=2, zero=zero) for zero in target.abilities.zero]
    known = [solver.overlapped(layout) for layout in layouts if solver.unprofiled(layout) is None]
    for packing in packings(target, int(forecaster.index.text_tokens.max())):
        try:
            forecaster.epoch(packing, 2)
        except DataError:  # too few samples for such packs
            continue
        for layout, (vision, language) in product(known, target.abilities.switches):
            stage = Stage(
                vision=shape.vision_layers,
                language=shape.language_layers,
                recompute_vision=shape.vision_layers * vision,
                recompute_language=shape.language_layers * language,
            )
            yield Plan(packing=packing, layout=layout, stages=(stage,))


def least_seconds(forecaster: Forecaster, target: Target) -> float:
    """The time of the fastest plan on the grid that the trainer can hold."""
    in_order = target.abilities.packs == "in order"
    for seconds, plan in forecaster.ranked(plans(forecaster, target)):
        if not in_order or isinstance(plan.packing, Padded) or order_of(forecaster.epoch(plan.packing, 2)) is not None:
            return seconds
    raise AssertionError("no plan fits")


def restricted_to(trainer: str, job: JobFile, profile: Path) -> tuple[Restricted, Target]:
    read = load_job(job.path)
    shape = model_shape(read.model, read.training)
    cluster = cluster_of_file(read, shape, profile, ClusterOptions())
    forecaster = Forecaster(read, shape, cluster, ForecastData.of(read))
    target = Target(name=trainer, title=trainer, abilities=plugins.load(EXPORTS, trainer).abilities(read))
    return Restricted(forecaster, target), target


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize("trainer", parameters({name: name for name in plugins.names(EXPORTS)}, short=("qwen-vl",)))
def test_the_solved_plan_is_within_a_hundredth_of_the_best_on_a_grid(job: JobFile, profile: Path, trainer: str) -> None:
    restricted, target = restricted_to(trainer, job, profile)
    assert restricted.best().seconds <= 1.01 * least_seconds(restricted.forecaster, target)


@pytest.mark.usefixtures("in_bfloat16")
def test_a_further_limit_makes_no_epoch_faster_where_plans_that_are_not_solved_are_best(
    job: JobFile, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restricted, _ = restricted_to("qwen-vl", job, profile)
    monkeypatch.setattr(restricted, "_within", lambda _: ())  # so that packs that length alone limits are left
    assert restricted.without_split() <= restricted.with_switches()


@pytest.mark.usefixtures("in_bfloat16")
def test_a_trainer_without_packs_differs_by_no_other_part_of_the_price(
    job: JobFile, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs, padded = (restricted_to(trainer, job, profile)[0] for trainer in ("qwen-vl", "llama-factory"))
    for restricted in (packs, padded):
        monkeypatch.setattr(restricted, "_within", lambda _: ())  # so that packs that length alone limits are left
    assert padded.with_switches() == packs.with_switches()
    assert padded.without_split() == packs.without_split()
    assert padded.best().seconds > packs.best().seconds
