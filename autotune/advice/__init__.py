"""Plans for devices that are not here, from their data sheets."""
