"""Costs of layers and of what ranks exchange, as a profile measured them."""
