"""Valid files, what may be wrong with them, and how the program takes or refuses them."""
