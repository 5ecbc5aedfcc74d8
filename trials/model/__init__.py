"""Turns a Hugging Face vision-language model into a chain of layers, cut into pipeline stages."""
