"""What a profile has not timed, so that plans with some layouts cannot be predicted."""

from collections.abc import Container

from trials.layer_costs import LayerCosts
from trials.plan import Layout


def untimed(costs: LayerCosts, layout: Layout, tensor_degrees: Container[int] | None = None) -> str | None:
    """Return what plans with this layout need beyond the costs; None where they can be predicted.

    Tensor degrees must be among `tensor_degrees`, or if these are None, follow from those that were timed.
    """
    if not costs.knows_tensor(layout.tensor) if tensor_degrees is None else layout.tensor not in tensor_degrees:
        return f"what {layout.tensor} ranks exchange that hold layers together"
    if not costs.knows_zero(layout.zero):
        return f"what ranks exchange that hold gradients or weights in shares (ZeRO {layout.zero})"
    if not costs.knows_reduction(layout):
        return f"averages of gradients over {layout.reduce_within} data ranks of a node first"
    if layout.offload != "none" and (costs.host_seconds_per_byte is None or costs.compile_seconds is not None):
        return "copies of what layers keep to the host's memory and back"
    return None
