"""Creation, upgrade, backup, checks and repair of the tables."""
