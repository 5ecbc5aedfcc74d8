"""Predicted prices of plans in other trainers: models of public sizes on clusters of data sheets, without a device."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import numpy as np

from autotune.advice.data_sheets import DATA_SHEETS
from autotune.advice.recommendation import sheet_cluster
from autotune.advice.sheet_costs import DEVICES_OF_NODE, SheetCosts
from autotune.errors import ExportError, NoFeasiblePlan
from autotune.exporting.checks import target_of
from autotune.exporting.closest import HeldPlan, Restricted
from autotune.exporting.price import price_of
from autotune.exporting.trainers import EXPORTS
from autotune.forecast.forecast import Forecast, ForecastData, Forecaster
from autotune.job_file import job_of_values
from autotune.model_shape import model_shape
from autotune.plan_text import plan_text
from autotune.search.execution.profiling import design
from benchmarks.cases import pages
from benchmarks.cases.lengths import generated, index_of
from benchmarks.devices.models import Model, make_example, with_model
from benchmarks.output.result import Check, at_most, show
from trials import plugins
from trials.data.index import DatasetIndex, profile
from trials.job import Job
from trials.plan import Packed

CLUSTERS = (("h100", 8), ("l40s", 8), ("a100-40gb", 16), ("a100-80gb", 32))
"""Data sheets, and numbers of devices."""
_INTERNVL = {
    # Sizes of OpenGVLab/InternVL3-8B-hf.
    "InternVL3-8B": Model(vision=(24, 1024, 4096, 16), language=(28, 3584, 18944, 28), kv_heads=4, vocabulary=151_674),
}
_QWEN = {
    # Sizes of Qwen/Qwen2.5-VL-7B-Instruct and Qwen/Qwen2.5-VL-32B-Instruct: width of the vision tower's feed-forward
    # part, layers, width, width of the feed-forward part, heads, and heads of keys.
    "Qwen2.5-VL-7B": (3420, 28, 3584, 18_944, 28, 4),
    "Qwen2.5-VL-32B": (3456, 64, 5120, 27_648, 40, 8),
}
_SAMPLES, _BATCH, _READ = 5000, 256, 16
_DRAWN, _APART = 40, 0.5
"""Pairs of other capacities, and how far their logarithms may be from those of the solved plan."""
_ROUNDING = 1e-3
"""Share by which a step may have more samples than another that counts as equal."""
_PATCHES, _MOST_PATCHES = 350, 1280
"""Merged patches of a page, at the median and at most."""


def price_rows(clusters: Sequence[tuple[str, int]] = CLUSTERS) -> Iterator[Mapping[str, Any]]:
    """Yield a row for each model, cluster, and trainer that trains models of its type."""
    with TemporaryDirectory() as folder:
        for name, job, index in _jobs(Path(folder)):
            shape = model_shape(job.model, job.training)
            data = replace(ForecastData.of(job), index=index)
            sizes = design(profile(index), shape, (), DEVICES_OF_NODE, 0.0).sizes
            for device, count in clusters:
                sheet = DATA_SHEETS[device]
                costs = SheetCosts.of(sheet, job.model, job.training, sizes)
                forecaster = Forecaster(job, shape, sheet_cluster(job, shape, costs, count), data)
                row = {"model": name, "device": sheet.name, "devices": count}
                yield from ({**row, **found} for found in _of_cluster(forecaster))


def price_checks(rows: Sequence[Mapping[str, Any]]) -> list[Check]:
    """A trainer's plan is one of all plans, so it may be better than the best one found by the solver's error alone.

    Plans with more samples in a step, within the job's tolerance, make fewer updates: they are faster by that alone.
    """
    priced = [row for row in rows if "price" in row]
    return [
        at_most("best plan over the plan of a trainer", [1 / row["price"] for row in priced], 1.01),
        at_most("plan of a trainer over the best with other capacities", [row["over_others"] for row in priced], 1.01),
        at_most("the same, with no more samples in a step", [row["over_alike"] for row in priced], 1.01),
    ]


def _of_cluster(forecaster: Forecaster) -> Iterator[Mapping[str, Any]]:
    begun = process_time()
    try:
        best = forecaster.best(1)[0]
    except NoFeasiblePlan as error:
        yield {"why_not": str(error)}
        return
    found = {"plan": plan_text(best.plan), "epoch_seconds": best.prediction.epoch_seconds}
    show(f"{forecaster.shape.name} on {forecaster.cluster.devices} {forecaster.cluster.name}: {found['plan']}")
    yield {**found, "cpu_seconds": process_time() - begun}
    for trainer in plugins.names(EXPORTS):
        try:
            target = target_of(trainer, forecaster.job, forecaster.shape.family)
        except ExportError:  # models of another type
            continue
        begun = process_time()
        priced = _priced(best, Restricted(forecaster, target))
        show(f"  {trainer}: {priced.get('price', 'no plan fits')}")
        yield {"trainer": trainer, **priced, "cpu_seconds": process_time() - begun}


def _priced(best: Forecast, restricted: Restricted) -> Mapping[str, Any]:
    try:
        held = restricted.holding(best.plan) or restricted.best()
    except ExportError as error:
        return {"why_not": str(error)}
    price = price_of(best, held, None, restricted)
    found = {"price": price.over_wanted, "parts": price.parts, "plan": plan_text(held.plan)}
    others, most = [*_others(held, restricted)], (1 + _ROUNDING) * _batch(held, restricted)
    alike = [other for other in others if _batch(other, restricted) <= most]
    return {
        **found,
        "step_samples": _batch(held, restricted),
        "over_others": held.seconds / min(map(attrgetter("seconds"), others)),
        "over_alike": held.seconds / min(map(attrgetter("seconds"), alike)),
    }


def _batch(held: HeldPlan, restricted: Restricted) -> float:
    """Return the mean samples of a full step."""
    return restricted.forecaster.epoch(held.plan.packing, held.plan.layout.data).batch_samples


def _others(held: HeldPlan, restricted: Restricted) -> Iterator[HeldPlan]:
    """Yield the plan, and plans like it with packs of other capacities, drawn around its own."""
    yield held
    packing, (stage, *_) = held.plan.packing, held.plan.stages
    data, random = restricted.forecaster.workload.data, np.random.default_rng(0)
    if not isinstance(packing, Packed):
        return
    for factors in np.exp(random.uniform(-_APART, _APART, (_DRAWN, 2))).tolist():
        qv = max(round(packing.qv * factors[0]), data.most_vision_units)
        qt = max(round(packing.qt * factors[1]), data.longest_text_tokens)
        other = replace(packing, qv=qv, qt=qt, qv_min=qv, qt_min=max(0, qt - packing.qt + packing.qt_min))
        for vision, language in restricted.abilities.switches:
            of_stage = replace(
                stage, recompute_vision=stage.vision * vision, recompute_language=stage.language * language
            )
            plan = replace(held.plan, packing=other, stages=(of_stage,))
            if restricted.forecaster.ranked([plan]) and (found := restricted.holding(plan)):
                yield found


def _jobs(folder: Path) -> Iterator[tuple[str, Job, DatasetIndex]]:
    """Yield names, jobs with a few real samples, and the lengths of many samples like them."""
    example = make_example(folder, _READ)
    for name, sizes in _INTERNVL.items():
        model = with_model(example, sizes, name)
        yield name, _job(model, example / "data" / "train.jsonl"), generated("tiles", _SAMPLES)
    data = pages.make_data(folder / "pages", _READ, patches=_PATCHES)
    for name, layers in _QWEN.items():
        _save_qwen(folder / name, layers)
        yield name, _job(folder / name, data), _pages()


def _job(model: Path, data: Path) -> Job:
    return job_of_values(
        {
            "model": {"path": str(model), "weights": "random"},
            "data": {"sources": [{"path": str(data)}]},
            "training": {"global_batch_samples": _BATCH},
        }
    )


def _save_qwen(folder: Path, sizes: tuple[int, int, int, int, int, int]) -> None:
    inner, layers, hidden, mlp, heads, kv_heads = sizes
    vision = {
        "depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": inner, "out_hidden_size": hidden,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }  # fmt: skip
    text = {
        "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": 152_064, "max_position_embeddings": 32_768,
    }  # fmt: skip
    pages.save_model(folder, vision, text, section=[16, 24, 24], most_patches=_MOST_PATCHES)


def _pages() -> DatasetIndex:
    """Return lengths of pages in their own resolution with answers, and a fifth of chats without an image."""
    random = np.random.default_rng(0)
    patches = np.clip(random.lognormal(np.log(_PATCHES), 0.7, _SAMPLES), 4, _MOST_PATCHES)
    units = np.where(random.random(_SAMPLES) < 0.8, patches, 0).astype(np.int64)
    # As benchmarks.cases.pages has them: a chat has four times as many words.
    targets = 1 + random.lognormal(np.where(units > 0, 4.0, 5.4), 0.8, _SAMPLES).astype(np.int64)
    return index_of(units, units + targets + 30, targets)
