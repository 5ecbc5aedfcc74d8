"""Dimensions of layouts: one module for each, with its part of names, texts, checks and offers. `folds` joins them."""
