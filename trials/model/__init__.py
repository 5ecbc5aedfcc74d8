"""A Hugging Face vision-language model as a chain of layers, cut into pipeline stages."""
