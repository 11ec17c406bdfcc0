"""The page *Plan*: the plan in force, what else could be, and what to do about it; of the planner's HTTP API only."""
