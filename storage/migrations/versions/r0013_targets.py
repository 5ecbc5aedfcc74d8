"""The head's operations for each target, and the targets of a dataset. The head counted for each token before."""

from alembic import op
from sqlalchemy import BigInteger, Column, Double, text

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.add_column("autotune_model", Column("target_flops", Double(), nullable=False, server_default=text("0")))
    op.add_column("autotune_data_profile", Column("target_tokens", BigInteger()))
