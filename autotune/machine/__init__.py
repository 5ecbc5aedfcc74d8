"""This machine: its devices, their conditions, and exclusive use of them."""
