"""Where the files of a model lie: folders, copies on nodes, and the cache of the Hugging Face hub."""
