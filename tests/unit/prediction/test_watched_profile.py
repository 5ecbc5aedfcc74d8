"""What profiles say of themselves: whether the machine was disturbed, and for which data they were made."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from autotune.events import Note
from autotune.forecast import profile_file
from autotune.machine.conditions import Conditions
from autotune.prediction.fit.profiled_sizes import beyond_profile, largest_sizes
from autotune.search.execution.profiling import layer_costs, profile_layers
from storage.store import open_store
from tests.machines.simulated import Undisturbed
from tests.values.reports import reports_of
from tests.values.search import COSTS, prepared_of
from trials import wire
from trials.costs.profiled_sizes import ProfiledSizes
from trials.run.pool import Answers


class Answering:
    """Ranks whose answer is known, which count how often they are asked."""

    asked = 0

    def ask(self, *_: Any, **__: Any) -> Answers:
        self.asked += 1
        return Answers(reports=tuple(reports_of(COSTS, 0.0)))


class SlowedDown(Undisturbed):
    @property
    def conditions(self) -> Conditions:
        return replace(super().conditions, throttled=("power brake",))


@pytest.mark.parametrize(("watch", "warned"), [(Undisturbed, False), (SlowedDown, True)])
def test_what_disturbed_a_profile_is_named_with_the_remedy(
    watch: type[Undisturbed], warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = prepared_of(tmp_path)
    costs = profile_layers(prepared, Answering(), tmp_path, watch)
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        work = prepared.workload
        store.add_workload(work)
        store.save_layer_profile(work.hardware.fingerprint, work.model.fingerprint, work.software, wire.encode(costs))
        assert layer_costs(prepared, store, Answering(), tmp_path) == costs
        (profile,) = store.layer_profiles()
    named = f"{profile_file.stored_costs(profile)}"
    assert named.endswith(", while the devices were slowed down: power brake" if warned else " UTC")
    # When it is measured, and when it is taken again.
    assert caplog.messages == 2 * warned * [
        "while the layers were timed, the devices were slowed down: power brake; predictions are less certain until "
        "trials correct them; `autotune profile JOB --fresh` measures again"
    ]


def enlarged(sizes: ProfiledSizes, **factors: float) -> ProfiledSizes:
    return replace(sizes, **{name: round(getattr(sizes, name) * factor) for name, factor in factors.items()})


@pytest.mark.parametrize(
    ("factors", "why"),
    [
        ({}, None),
        ({"units": 9, "tokens": 9}, None),  # smaller packs were profiled too
        ({"tokens": 0.6}, None),
        ({"image_units": 12}, None),  # of tiles, or of patches that attend to few others
        ({"tokens": 1 / 16}, "the profile is of packs of up to {tokens} tokens, but these data have {wanted.tokens}"),
        (
            {"units": 0.25, "image_units": 33},
            "the profile is of images of about {image_units} vision units, but these data have {wanted.image_units} "
            "and of packs of up to {units} vision units, but these data have {wanted.units}",
        ),
        ({"image_units": 0}, "the profile is of data without images, of which these data have some"),
    ],
)
def test_a_profile_of_data_with_other_sizes_is_measured_again(
    factors: dict[str, float], why: str | None, tmp_path: Path
) -> None:
    prepared, heard = prepared_of(tmp_path), list[object]()
    work = prepared.workload
    wanted = largest_sizes(work.data, work.model)
    sizes = enlarged(wanted, **factors)
    stored = replace(COSTS, sizes=sizes)
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        store.add_workload(work)
        store.save_layer_profile(work.hardware.fingerprint, work.model.fingerprint, work.software, wire.encode(stored))
        found = layer_costs(prepared, store, Answering(), tmp_path, heard.append)
        assert layer_costs(prepared, store, Answering(), tmp_path) == found
    if why is None:
        assert (found, heard) == (stored, [])
    else:
        assert found.sizes == wanted
        said = why.format(**asdict(sizes), wanted=wanted)
        assert heard[0] == Note(text=f"The layers are profiled again: {said}")


@pytest.mark.parametrize(("of_one", "of_other", "serves"), [(6.2, 6.3, True), (1, 12.6, True), (256, 1024, False)])
def test_images_of_other_sizes_need_another_profile_where_a_unit_costs_something_else(
    of_one: float, of_other: float, serves: bool, tmp_path: Path
) -> None:
    work = prepared_of(tmp_path).workload
    one, other = (
        replace(
            work.data,
            samples=1000,
            text_only_samples=0,
            vision_units=round(1000 * units),
            most_vision_units=4096,
            text_tokens=600_000,
        )
        for units in (of_one, of_other)
    )
    for profiled, wanted in (one, other), (other, one):
        sizes = largest_sizes(profiled, work.model)
        assert (beyond_profile(replace(sizes, units=8 * 4096), wanted, work.model) is None) is serves


def test_jobs_in_turns_share_one_profile(tmp_path: Path) -> None:
    shown, ranks = prepared_of(tmp_path), Answering()
    data = shown.workload.data
    lengthy = replace(
        data, vision_units=0, most_vision_units=0, text_only_samples=data.samples, longest_text_tokens=32_768
    )
    longer = replace(shown, workload=replace(shown.workload, data=lengthy))
    many = replace(shown, workload=replace(shown.workload, data=replace(data, most_vision_units=4096)))
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        store.add_workload(shown.workload)
        for prepared in (shown, longer, many, shown, longer, many):
            found = layer_costs(prepared, store, ranks, tmp_path)
    assert ranks.asked == 3
    assert found.sizes == ProfiledSizes(units=4096, image_units=4, tokens=32_768)
