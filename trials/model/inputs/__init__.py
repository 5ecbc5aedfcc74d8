"""Text and images as a model's own tokenizer and processor encode them."""
