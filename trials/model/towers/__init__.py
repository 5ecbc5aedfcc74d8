"""Vision towers and images that several families share."""
