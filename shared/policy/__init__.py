"""Decisions, pure: placement, split, dispatch, order, admission, role flips, SLO. Each comes with its reasons."""
