"""What people read of an export."""

from dataclasses import replace
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
    obstacle=None,
    plan=PADDED_PLAN,
    wanted=PADDED_PLAN,
    missing=(),
    left_out=("the order of the packs",),
    notes=("First add a line",),
    price=Price(seconds=2.0, plan_seconds=2.0, parts={}, present_seconds=None),
    skipped_lines=0,
)


def test_the_start_names_the_folder_and_comes_after_what_keeps_the_trainer_from_it() -> None:
    start = "in src of its repository with: bash /x/out/sft.sh\n- First add a line"
    assert export_text(FOUND).endswith(f"\n\nStart it {start}")
    kept = replace(FOUND, obstacle="its attention takes no float32; set model.dtype: bfloat16")
    text = export_text(kept)
    assert text.endswith(f"A trainer cannot train this as it stands: {kept.obstacle}\nAfter that, start it {start}")
