"""Text about what a deletion of studies removes."""

from storage.deletion import Deletion
from trials.units import number_of


def deletion_text(deletion: Deletion) -> str:
    """Describe what is deleted with the studies, and the effect on other studies."""
    parts = (
        (deletion.trials, "trial", ""),
        (deletion.best_plans, "best plan", ""),
        (deletion.plans, "plan", " that no other study tried"),
        (deletion.launches, "record", " of trainings with these plans"),
        (deletion.notes, "note", ""),
        (deletion.tags, "tag", ""),
    )
    counts = ", ".join(f"{number_of(count, noun)}{rest}" for count, noun, rest in parts if count)
    noun = "study" if len(deletion.studies) == 1 else "studies"
    lines = [f"{noun} {', '.join(deletion.studies)}, with {counts or 'nothing in it'}."]
    if deletion.trials:
        lines.append("Later searches cannot use these measurements; layer profiles stay.")
    if deletion.calibrations:
        lines.append("Later searches on similar workloads do not start from its calibration.")
    if deletion.heirs:
        lines.append(
            f"Later studies of the same workload: {', '.join(deletion.heirs)}. They may have used these results; "
            "their winners stay, but plans that only a deleted study tried cannot be shown any more."
        )
    return "\n".join(lines)
