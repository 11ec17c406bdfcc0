"""Manifests for orchestrators, rendered from a cluster file."""
