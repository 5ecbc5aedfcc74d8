"""What profiles say of themselves: whether the machine was disturbed, and for which data they were made."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from autotune.events import Note
from autotune.forecast import profile_file
from autotune.machine.conditions import Conditions
from autotune.prediction.fit.profiled_sizes import largest_sizes
from autotune.search.execution.profiling import layer_costs, profile_layers
from storage.store import open_store
from tests.machines.simulated import Undisturbed
from tests.values.reports import reports_of
from tests.values.search import COSTS, prepared_of
from trials import wire
from trials.costs.profiled_sizes import ProfiledSizes
from trials.run.pool import Answers


class Answering:
    """Ranks whose answer is known."""

    def ask(self, *_: Any, **__: Any) -> Answers:
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
        ({"tokens": 1 / 16}, "the profile is of packs of up to {tokens} tokens, but these data have {wanted.tokens}"),
        (
            {"units": 0.25, "image_units": 9},
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
