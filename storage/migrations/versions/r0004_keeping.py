"""Notes and tags, archived studies, deleted rows, and the study that an agent works on."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("autotune_agent", sa.Column("study_id", sa.Text()))
    op.add_column("autotune_study", sa.Column("archived", sa.DateTime(timezone=True)))
    op.create_table(
        "autotune_note",
        sa.Column("kind", sa.Text(), primary_key=True),
        sa.Column("key", sa.Text(), primary_key=True),
        sa.Column("text", sa.Text(), nullable=False),
    )
    op.create_table(
        "autotune_tag",
        sa.Column("kind", sa.Text(), primary_key=True),
        sa.Column("key", sa.Text(), primary_key=True),
        sa.Column("tag", sa.Text(), primary_key=True),
    )
    op.create_table(
        "autotune_deleted",
        sa.Column("kind", sa.Text(), primary_key=True),
        sa.Column("key", sa.Text(), primary_key=True),
        sa.Column("deleted", sa.DateTime(timezone=True), nullable=False),
    )
