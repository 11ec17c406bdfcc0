"""The planner: searches for plans, and keeps the roles and routes of the running cluster right."""
