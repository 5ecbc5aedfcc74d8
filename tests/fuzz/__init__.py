"""Valid files, damage to them, and how the program accepts or refuses the result."""
