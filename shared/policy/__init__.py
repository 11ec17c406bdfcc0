"""Decisions, pure: placement, split, dispatch, order, admission, SLO. Each comes with its reasons."""
