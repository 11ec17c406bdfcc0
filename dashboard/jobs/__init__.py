"""Requests: a search, and one of them in full."""
