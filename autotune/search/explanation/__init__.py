"""Why the winner of a search won."""
