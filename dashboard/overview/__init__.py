"""The first page: how the cluster does, why, and how it came to that."""
