"""Trials on the hardware: run, checked, recorded in the ledger, and the layer profile that they need."""
