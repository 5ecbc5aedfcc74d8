"""Reports of studies: one HTML file that explains what a search found, and works without a network."""
