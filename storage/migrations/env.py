"""Run revisions inside the transaction that `storage.upkeep.schema` opened: wholly or not at all."""

from alembic import context

from storage.database.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,  # for its naming convention
    version_table=context.config.attributes["version_table"],
)
context.run_migrations()
