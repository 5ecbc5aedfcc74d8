"""Alembic's script directory: `storage.upkeep.schema` runs it, never the `alembic` command."""
