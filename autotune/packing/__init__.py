"""What `autotune pack` does: packs a job or lengths, measures the balance, shows it and writes the packs."""
