"""Alembic's script directory: `storage.schema` runs it, never the `alembic` command."""
