"""Queries, one module for each kind of record."""
