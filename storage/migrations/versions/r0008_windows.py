"""The speed of trainings by window of steps. That of earlier trainings is not known."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_table(
        "autotune_launch_window",
        sa.Column("launch_id", sa.Text(), sa.ForeignKey("autotune_launch.id"), primary_key=True),
        sa.Column("first_step", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("step_seconds", sa.Double(), nullable=False),
        sa.Column("samples_per_second", sa.Double(), nullable=False),
        sa.Column("tokens_per_second", sa.Double(), nullable=False),
        sa.Column("promised_samples_per_second", sa.Double()),
        sa.Column("parts", sa.Text(), nullable=False),
    )
