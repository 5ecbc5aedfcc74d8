"""Links and nodes of the hardware, repeated runs, late results, leases of devices, and what came with bundles."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("autotune_hardware", sa.Column("nodes", sa.BigInteger(), nullable=False, server_default=sa.text("1")))
    op.add_column("autotune_hardware", sa.Column("link", sa.Text()))
    op.add_column("autotune_hardware", sa.Column("topology", sa.Text()))
    op.add_column("autotune_agent", sa.Column("heard", sa.DateTime(timezone=True)))
    op.add_column("autotune_trial", sa.Column("given_up", sa.DateTime(timezone=True)))
    op.add_column("autotune_outcome", sa.Column("seconds", sa.Double()))
    op.add_column(
        "autotune_launch",
        sa.Column("agent_id", sa.Text(), sa.ForeignKey("autotune_agent.id", name="fk_autotune_launch_agent_id")),
        inline_references=True,  # the only way that SQLite knows
    )
    op.create_table(
        "autotune_attempt",
        sa.Column("trial_id", sa.Text(), sa.ForeignKey("autotune_trial.id"), primary_key=True),
        sa.Column("number", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("epoch_seconds", sa.Double()),
        sa.Column("contamination", sa.Text(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
    )
    op.create_table(
        "autotune_lease",
        sa.Column("resource", sa.Text(), primary_key=True),
        sa.Column("agent_id", sa.Text(), sa.ForeignKey("autotune_agent.id"), nullable=False, index=True),
    )
    op.create_table(
        "autotune_bundle",
        sa.Column("digest", sa.Text(), primary_key=True),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("exported", sa.DateTime(timezone=True), nullable=False),
        sa.Column("imported", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_table(
        "autotune_provenance",
        sa.Column("kind", sa.Text(), primary_key=True),
        sa.Column("key", sa.Text(), primary_key=True),
        sa.Column("bundle_digest", sa.Text(), sa.ForeignKey("autotune_bundle.digest"), nullable=False, index=True),
    )
