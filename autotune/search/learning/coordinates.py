"""Coordinates of plans and of packs: those that are near each other are alike beyond what is predicted."""

import math

import numpy as np

from autotune.dimensions.folds import layout_coordinates
from autotune.prediction.columns import SQUARES
from autotune.prediction.predictor import Predictor
from autotune.search.solver.rungs import rungs_of
from trials import plugins
from trials.arrays import Floats
from trials.data.packers import PACKERS
from trials.plan import Layout, Packed, Packing, Padded, Plan
from trials.stage import TOWERS

_PACKER_NAMES = plugins.names(PACKERS)
_PACKER = 0.3 / math.sqrt(2)
"""Coordinate of a packer on an axis of its own, so that any two of them are 0.3 apart."""


def pack_coordinates(predictor: Predictor, packing: Packing, layout: Layout) -> Floats:
    """Return the coordinates of packs; the sizes of a mean pack count by their ratios."""
    units, tokens = predictor.sizes(packing, layout).mean[0, :SQUARES].tolist()
    return np.array((math.log(tokens), math.log(units) / 2, math.log2(layout.pipeline) / 2))


def plan_coordinates(predictor: Predictor, plan: Plan) -> Floats:
    """Return the coordinates of a plan; plans at a distance of 1 have little in common."""
    stages, sizes = plan.stages, predictor.sizes(plan.packing, plan.layout)
    # Slacks and packer of a ladder are the same at all levels.
    packing = plan.packing if isinstance(plan.packing, Padded) else plan.packing.levels[-1]
    degrees, shares = plan.packing.degrees, [*enumerate(each.row_share for each in sizes.of_levels)]
    slack = (0.0, 0.0)
    if isinstance(packing, Packed):
        slack = 1 - packing.qv_min / max(packing.qv, 1), 1 - packing.qt_min / packing.qt
    # The layers up to each quarter of the stages compare splits over different numbers of stages.
    boundaries = np.cumsum([0, *(stage.vision + stage.language for stage in stages)])
    share = np.interp((0.25, 0.5, 0.75), np.linspace(0, 1, len(boundaries)), boundaries / boundaries[-1])
    vision, language = sum(stage.vision for stage in stages), sum(stage.language for stage in stages)
    return np.array(
        [
            *layout_coordinates(plan.layout),
            isinstance(packing, Packed),
            *(_PACKER * (isinstance(packing, Packed) and packing.packer == name) for name in _PACKER_NAMES),
            math.log2(sizes.epoch.micro_batches) / 2,
            math.log(sizes.mean[0, 0]) / 2,
            math.log(sizes.mean[0, 1]) / 2,
            *slack,
            *(4 * share),
            *(
                sum(
                    of_rows * rungs_of(stage.recomputed[level], tower, 2)
                    for stage in stages
                    for level, of_rows in shares
                )
                / max(2 * layers, 1)
                for tower, layers in zip(TOWERS, (vision, language), strict=True)
            ),
            len(degrees) - 1,
            math.log2(max(degrees)),
        ]
    )
