"""Tokens of samples as trainers count them. A module for each trainer with a package, which runs in its environment."""
