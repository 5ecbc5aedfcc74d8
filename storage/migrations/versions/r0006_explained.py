"""Why winners won. Those that were stored before have no explanation."""

from alembic import op
from sqlalchemy import Column, Text

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("autotune_best_plan", Column("explanation", Text()))
