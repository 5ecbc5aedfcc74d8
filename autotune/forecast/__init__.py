"""What plans would take on devices that may not be here, without running them."""
