"""Who is at the dashboard, and what they may do."""
