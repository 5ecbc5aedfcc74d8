"""Weights that ZeRO 3 gathers a layer at a time: loss and gradients of every family are those of the plain model."""

from pathlib import Path

import pytest

from tests.contracts.test_families import TINY
from tests.integration.models.layouts.test_sharing import FAMILIES
from tests.integration.models.test_parity import check
from tests.values.parameters import parameters
from tests.values.training import plan_of, prepared_of
from trials import plugins
from trials.plan import Packed
from trials.run.pool import WarmPool

pytestmark = pytest.mark.ranks
WITHIN = 1e-5


@pytest.mark.parametrize("family", parameters({name: name for name in FAMILIES}, short=("qwen3-vl",)))
def test_every_family_gathers_its_weights_by_layer(family: str, example: Path, pool: WarmPool, tmp_path: Path) -> None:
    plugins.load(TINY, family).make(tmp_path / "model")
    job = prepared_of(example, tmp_path, model={"path": str(tmp_path / "model")})
    shape = job.workload.model
    units, tokens = (int(2.5 * column.max()) for column in (job.index.vision_units, job.index.text_tokens))
    packing = Packed(qv=units, qt=tokens, qv_min=0, qt_min=0)
    plan = plan_of(f"{shape.vision_layers}+{shape.language_layers}r1,1", data=2, zero=3, packing=packing)
    check(plan, job, pool, WITHIN)
