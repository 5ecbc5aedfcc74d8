"""What is refused before a model is built, and why."""
