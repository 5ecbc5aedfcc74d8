"""Packs for a training loop of one's own: samples, batch samplers and a collator."""
