"""Results of searches as text and as values for programs."""
