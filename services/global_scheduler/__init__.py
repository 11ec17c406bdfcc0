"""The global scheduler: placement, and the status table of requests."""
