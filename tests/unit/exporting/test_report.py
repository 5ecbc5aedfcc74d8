"""What people read of an export."""

from pathlib import Path

from autotune.exporting.export import Exported
from autotune.exporting.price import Price
from autotune.exporting.report import export_text
from tests.values.storage import PADDED_PLAN

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
    price=Price(seconds=2.0, plan_seconds=2.0, parts={}, present_seconds=None),
    skipped_lines=0,
)


def test_the_start_names_the_folder_and_comes_last() -> None:
    start = "Start it in src of its repository with: bash /x/out/sft.sh\n- First add a line"
    assert export_text(FOUND).endswith(f"\n\n{start}")
