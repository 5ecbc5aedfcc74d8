"""Data: annotation files to micro-batches. Nothing here decodes a pixel before a micro-batch is asked for."""
