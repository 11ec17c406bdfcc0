"""Methods that find plans, by name."""
