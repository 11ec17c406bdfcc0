"""Output-length prediction: an OPT classifier behind an HTTP interface."""
