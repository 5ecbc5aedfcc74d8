"""The ends of the chain: the patch embedding, and the head with the loss."""
