"""The cluster in virtual time: the same policies and the same costs as the live services, no clock, no I/O.

`workload` says what arrives (`traces` and `arrivals` make workloads), `spec` which instances there are and how they
are run, `cluster` drives the events of a run, `engine` is one instance's continuous batching, `network` the links;
`outcomes` holds what happened to each request and `metrics` what it amounts to.
"""
