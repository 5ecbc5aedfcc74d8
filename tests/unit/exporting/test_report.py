"""What people read of an export."""

from dataclasses import replace
from pathlib import Path

from autotune.exporting.export import Exported
from autotune.exporting.price import EpochTime, Price
from autotune.exporting.report import export_document, export_text
from tests.values.storage import PADDED_PLAN

TIME = EpochTime(seconds=2.0, error=0.3)
FOUND = Exported(
    trainer="A trainer",
    folder=Path("out"),
    files=("train.json", "sft.sh"),
    command="bash /x/out/sft.sh",
    starts_in="src of its repository",
    plan=PADDED_PLAN,
    wanted=PADDED_PLAN,
    missing=(),
    left_out=("the order of the packs",),
    notes=("First add a line",),
    price=Price(epoch=TIME, wanted=EpochTime(seconds=1.0, error=0.1), parts={}, present=None),
    skipped_lines=0,
)


def test_the_start_names_the_folder_and_comes_last() -> None:
    start = "Start it in src of its repository with: bash /x/out/sft.sh\n- First add a line"
    assert export_text(FOUND).endswith(f"\n\n{start}")


def test_predicted_times_have_their_errors() -> None:
    present = replace(FOUND, price=replace(FOUND.price, present=EpochTime(seconds=4.0, error=0.4)))
    assert "An epoch is predicted to take 2.0 +- 0.3 s, 2.000 times the 1.0 +- 0.1 s of plan " in export_text(present)
    assert "Over your present configuration: 0.500 times its predicted 4.0 +- 0.4 s" in export_text(present)
    assert export_document(present)["price"]["present_epoch_seconds_error"] == 0.4
    assert export_document(FOUND)["price"]["present_epoch_seconds_error"] is None
