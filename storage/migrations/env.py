"""Runs revisions inside the transaction that `storage.schema` opened, so that they happen wholly or not at all."""

from alembic import context

from storage.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,  # for its naming convention
    version_table=context.config.attributes["version_table"],
)
context.run_migrations()
