"""Gateway, scheduler and monitor of a small cluster in one process."""
