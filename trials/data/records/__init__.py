"""Records of annotation files, and the conversations and images in them."""
