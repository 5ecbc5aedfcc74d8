"""A cache of the token ids of samples, written when their lengths are measured."""
