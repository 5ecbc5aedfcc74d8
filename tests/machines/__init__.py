"""Stand-ins for hardware, clusters and rank processes."""
