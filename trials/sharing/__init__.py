"""Packs that several ranks compute together (Ulysses sequence parallelism). Nothing here knows DeepSpeed or a model."""
