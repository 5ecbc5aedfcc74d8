"""An export as a text for people and as a document for programs."""

from typing import Any

from autotune.exporting.export import Exported
from autotune.exporting.price import MEANINGS, EpochTime
from autotune.plan_text import plan_text
from autotune.results.text_table import table
from trials import wire


def export_document(found: Exported) -> dict[str, Any]:
    """Return the export as JSON values: seconds, and factors of 1."""
    price = found.price
    return {
        "trainer": found.trainer,
        "folder": str(found.folder),
        "files": list(found.files),
        "command": found.command,
        "starts_in": found.starts_in,
        "skipped_lines": found.skipped_lines,
        "plan": wire.to_document(found.plan),
        "plan_id": found.plan.id,
        "wanted_id": found.wanted.id,
        "missing": list(found.missing),
        "left_out": list(found.left_out),
        "notes": list(found.notes),
        "price": {
            "epoch_seconds": price.epoch.seconds,
            "epoch_seconds_error": price.epoch.error,
            "wanted_epoch_seconds": price.wanted.seconds,
            "wanted_epoch_seconds_error": price.wanted.error,
            "over_wanted": price.over_wanted,
            "parts": price.parts,
            "present_epoch_seconds": price.present and price.present.seconds,
            "present_epoch_seconds_error": price.present and price.present.error,
            "over_present": price.over_present,
        },
    }


def export_text(found: Exported) -> str:
    """Return what was written, which plan it is, its price, what is left out, and how to start it."""
    return "\n\n".join(filter(None, (_plans(found), _price(found), _listed(found), _start(found))))


def _plans(found: Exported) -> str:
    written = f"Wrote {', '.join(found.files)} for {found.trainer} to {found.folder}"
    if not found.missing:
        return f"{written}\nThey hold plan {found.plan.id}: {plan_text(found.plan)}"
    return (
        f"{written}\n{found.trainer} cannot hold plan {found.wanted.id}: {'; '.join(found.missing)}\n"
        f"The best plan that it can hold is {found.plan.id}: {plan_text(found.plan)}"
    )


def _price(found: Exported) -> str:
    price = found.price
    rows = [(name, f"{factor:.3f}", MEANINGS[name]) for name, factor in price.parts.items()]
    lines = [
        f"An epoch is predicted to take {_seconds(price.epoch)}, {price.over_wanted:.3f} times the "
        f"{_seconds(price.wanted)} of plan {found.wanted.id}; both with the kernels and the loss of this engine",
        table(("part of the price", "factor", "what it is"), rows),
    ]
    if price.present is not None:
        lines.append(
            f"Over your present configuration: {price.over_present:.3f} times its predicted {_seconds(price.present)}"
        )
    return "\n".join(lines)


def _seconds(time: EpochTime) -> str:
    return f"{time.seconds:.1f} +- {time.error:.1f} s"


def _listed(found: Exported) -> str:
    return "\n".join(("Not carried over:", *(f"- {each}" for each in found.left_out)))


def _start(found: Exported) -> str:
    notes = "".join(f"\n- {note}" for note in found.notes)
    return f"Start it in {found.starts_in} with: {found.command}{notes}"
