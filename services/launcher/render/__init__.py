"""Manifests for orchestrators, from the cluster file that `polyphase up` takes."""
