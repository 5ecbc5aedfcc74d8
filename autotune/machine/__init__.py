"""The machine at hand: its devices and their conditions, and which process may use them."""
