"""Models whose parts do not all train. All that was measured before trained whole models."""

from alembic import op
from sqlalchemy import Column, Text

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("autotune_model", Column("trained", Text()))
