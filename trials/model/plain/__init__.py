"""Models as transformers runs them: inputs of packs, and a shrunk copy to compare with."""
