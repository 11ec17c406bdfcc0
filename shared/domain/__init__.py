"""The words of the system as types: instances, jobs, routes, KV handles. No I/O, no clock."""
