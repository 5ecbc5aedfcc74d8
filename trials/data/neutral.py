"""The steps of an epoch compared with random ones."""

from typing import TYPE_CHECKING

from trials.certification import Neutrality
from trials.data.steps.traits import Traits, sums_of_steps, variance_ratios

if TYPE_CHECKING:
    from trials.data.epoch import Epoch


def neutrality(epoch: "Epoch") -> Neutrality:
    """Compare the full steps of an epoch with random ones; a last step with fewer rows does not count."""
    packs, size = epoch.packs, min(epoch.micro_batches, epoch.height)
    full = epoch.height // size
    steps = epoch.assignment[: full * size].reshape(full, -1)
    traits, degrees = Traits.of(epoch.index, packs.samples), epoch.degrees
    held = sums_of_steps(packs.counts, degrees, steps)
    ratios = variance_ratios(sums_of_steps(traits.deviations(packs.starts), degrees, steps), held)
    return Neutrality(
        steps=full,
        steps_near=epoch.settings.mixed.share_near(held, to_end=full * size == epoch.height),
        variances={name: float(ratio) for name, ratio in zip(traits.names, ratios, strict=True)},
    )
