"""Models as transformers runs them: inputs of packs, a shrunk copy, and comparisons with both."""
