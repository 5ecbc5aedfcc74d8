"""Models whose images are tiles, crops or whole images of one size."""
