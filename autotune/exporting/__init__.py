"""Plans as other trainers hold them: `autotune export`."""
