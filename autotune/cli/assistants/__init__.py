"""The commands for assistants, which call them as tools of the Model Context Protocol."""
