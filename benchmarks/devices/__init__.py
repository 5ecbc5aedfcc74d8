"""What the benchmark of devices measures, and where."""
