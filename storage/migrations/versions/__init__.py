"""One module per released schema. A released one is never changed."""
