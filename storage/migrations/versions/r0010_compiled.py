"""Models whose layers are compiled. All that was measured before ran layers as they are."""

from alembic import op
from sqlalchemy import Column, Text

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("autotune_model", Column("compiler", Text()))
