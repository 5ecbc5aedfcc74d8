"""Remembers: hardware, workloads, studies, trials, outcomes and plans, in SQLite or PostgreSQL."""
