"""The choice of a database."""

import os


def chosen_database(given: str | None, of_job: str | None) -> str | None:
    """Return the URL that was given, else AUTOTUNE_DB_URL unless it is empty, else the job's; None for the default."""
    return given if given is not None else os.environ.get("AUTOTUNE_DB_URL") or of_job
