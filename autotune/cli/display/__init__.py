"""What a command shows on stderr while it works: a live display at a terminal, lines elsewhere."""
