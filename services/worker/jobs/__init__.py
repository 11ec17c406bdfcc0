"""The jobs of an instance: its prefill and decode services, dispatch, and its role."""
