"""The times of single layers, links, updates and loading, measured on the ranks."""
