"""The sequence degree: data ranks that compute a pack together, each some of its tokens (DeepSpeed-Ulysses).

A packing has it, for packs of each level, and not a layout. So it has no part in layouts' names, texts and checks.
"""

from collections.abc import Sequence
from dataclasses import replace

from typing_extensions import override

from autotune.dimensions.dimension import Dimension
from trials.costs.exchange import Exchange
from trials.costs.layer_costs import LayerCosts
from trials.plan import Layout


def knows_sequence(costs: LayerCosts, degree: int) -> bool:
    """Return whether packs that `degree` ranks share can be predicted."""
    return degree == 1 or costs.is_of_one_rank or costs.exchange("sequence", degree, "language") is not None


class SequenceDimension(Dimension):
    """Ranks that share a pack. Tensor ranks divide it as if they shared it, but exchange around blocks instead."""

    @override
    def exchanges(
        self, costs: LayerCosts, layout: Layout, sequence: int, others: Sequence[Exchange]
    ) -> Sequence[Exchange]:
        """Return also what ranks exchange in the attention of a language layer and behind the projector.

        Raise ValueError where other profiles would have timed the degree.
        """
        together = sequence * layout.tensor
        if together == 1:
            return others
        if not knows_sequence(costs, together):
            raise ValueError(f"the profile has no times of what {together} ranks exchange that share a pack")
        nothing = Exchange(name="sequence", ranks=1, layer="language")
        held = costs.exchange("sequence", together, "language") or nothing
        timed = (costs.exchange("sequence", sequence, "language") if sequence > 1 else None) or nothing
        units, tokens, squares, constant = held.shared_bytes or costs["language"].shared_bytes
        # Rotary embeddings are those of all tokens that the tensor ranks gather.
        shared = (units, tokens * layout.tensor, squares, constant)
        own = replace(timed, kept_bytes=held.kept_bytes, shared_bytes=shared, transient_bytes=held.transient_bytes)
        behind = costs.exchange("sequence", together, "projector")
        return *others, own, *([behind] if behind else [])
