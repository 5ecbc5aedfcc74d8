"""Tensor degrees of plans, and tensor ranks of what trials measured. Trials with such plans were never run before."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    for table, column, default in (("plan", "tensor", "1"), ("stage_measurement", "tensor_rank", "0")):
        new = sa.Column(column, sa.BigInteger(), nullable=False, server_default=sa.text(default))
        op.add_column(f"autotune_{table}", new)
    plan = sa.table("autotune_plan", sa.column("id"), sa.column("document"), sa.column("tensor"))
    # A plan file that was launched may have one; a damaged document is left to `autotune db check`.
    cut = sa.select(plan.c.id, plan.c.document).where(plan.c.document.like('%"tensor":%'))
    for key, document in op.get_bind().execute(cut).all():
        if degree := _tensor(document):
            op.execute(sa.update(plan).where(plan.c.id == key).values(tensor=degree))


def _tensor(document: str) -> int | None:
    try:
        degree = json.loads(document)["layout"]["tensor"]
    except (ValueError, LookupError, TypeError):
        return None
    return degree if type(degree) is int else None
