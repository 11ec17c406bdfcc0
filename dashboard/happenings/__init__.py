"""What happened, and who did what."""
