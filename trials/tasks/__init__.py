"""What ranks are asked to do, and what they answer."""
