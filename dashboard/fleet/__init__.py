"""The instances: all of them, and each on a page of its own."""
