"""Costs of layers without a device: what is computed once, and what is loaded for it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from autotune.advice.data_sheets import DATA_SHEETS
from autotune.advice.operations import META, RooflineClock


def seconds_of(clock: RooflineClock, run: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    clock.seconds = 0.0
    with clock:
        found = run()
    return clock.seconds, found


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def products() -> torch.Tensor:
    return meta(8, 16) @ meta(16, 4)


def scaled() -> torch.Tensor:
    return torch.sigmoid(meta(8, 4)) * 2


def scaled_columns() -> torch.Tensor:
    return torch.sigmoid(meta(4, 8).t()) * 2


def whole() -> torch.Tensor:
    return meta(4, dtype=torch.int64) + 1


def broken() -> torch.Tensor:
    return meta(4, dtype=torch.int64) + 1.0


def true() -> torch.Tensor:
    return meta(4, dtype=torch.bool) + True


def summed() -> torch.Tensor:
    return meta(4, dtype=torch.bool) + 1


def added() -> torch.Tensor:
    return meta(4, 8).add_(meta(8))


def one_chosen() -> torch.Tensor:
    return meta(3, 8)[torch.tensor([True, False, False])]


def two_chosen() -> torch.Tensor:
    return meta(3, 8)[torch.tensor([True, False, True])]


def greatest() -> torch.Tensor:
    return meta(4, 8).max(dim=1).values


RUNS = [products, scaled, scaled_columns, whole, broken, true, summed, added, one_chosen, two_chosen, greatest]


def test_a_known_operation_takes_and_gives_what_a_new_one_does() -> None:
    sheet = DATA_SHEETS["h100"]
    clock = RooflineClock(sheet)
    for run in (*RUNS, *RUNS):
        known, new = seconds_of(clock, run), seconds_of(RooflineClock(sheet), run)
        assert known[0] == new[0] > 0, run.__name__
        for of in (torch.Tensor.size, torch.Tensor.stride, lambda each: (each.dtype, each.untyped_storage().nbytes())):
            assert of(known[1]) == of(new[1]), run.__name__


def test_views_take_no_time_and_share_the_memory_of_their_input_also_when_they_are_known() -> None:
    clock, given = RooflineClock(DATA_SHEETS["h100"]), meta(4, 8)
    for _ in range(2):
        # The second one is a view in effect, which torch does not declare.
        for run in (given.t, lambda: torch.ops.aten._unsafe_view(given, [8, 4])):
            seconds, view = seconds_of(clock, run)
            assert seconds == 0
            assert view.untyped_storage()._cdata == given.untyped_storage()._cdata
        assert seconds_of(clock, lambda: given * 2)[1].untyped_storage()._cdata != given.untyped_storage()._cdata


def test_an_operation_is_computed_once_for_each_shape_of_its_inputs() -> None:
    computed: list[torch.Size] = []

    @torch.library.custom_op("tests::halved", mutates_args=())
    def halved(given: torch.Tensor) -> torch.Tensor:
        return given / 2

    @halved.register_fake
    def _(given: torch.Tensor) -> torch.Tensor:
        computed.append(given.shape)
        return torch.empty_like(given)

    clock = RooflineClock(DATA_SHEETS["h100"])
    for rows in (2, 3, 2, 3, 2):
        assert seconds_of(clock, lambda: halved(meta(rows, 4)))[1].shape == (rows, 4)  # noqa: B023 (called at once)
    assert computed == [(2, 4), (3, 4)]


@pytest.mark.usefixtures("home")
def test_a_recommendation_does_not_load_deepspeed(example: Path) -> None:
    arguments = ["recommend", str(example / "model"), str(example / "data" / "train.jsonl"), "--device", "a10"]
    code = f"import sys, autotune.cli as cli; cli.main({[*arguments, '--devices', '1']}, standalone_mode=False)"
    program = f"{code}; print('torch' in sys.modules, 'deepspeed' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "does not fit" not in answer.stdout
    assert answer.stdout.splitlines()[-1] == "True False"
