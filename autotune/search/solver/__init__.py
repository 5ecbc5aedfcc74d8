"""Splits and recompute counts with the least predicted time that fit the memory, for one packing and layout."""
