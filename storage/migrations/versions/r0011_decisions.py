"""Decisions whether to compile layers, of jobs that leave it to the agent. There was none before."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table(
        "autotune_compile_decision",
        sa.Column("workload_fingerprint", sa.Text(), sa.ForeignKey("autotune_workload.fingerprint"), primary_key=True),
        sa.Column("steps", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("compiler", sa.Text()),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("decided", sa.DateTime(timezone=True), nullable=False),
    )
