"""Devices below their default power limit. All that was measured before is taken for devices at their default."""

from alembic import op
from sqlalchemy import BigInteger, Column

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.add_column("autotune_hardware", Column("power_limit_watts", BigInteger()))
