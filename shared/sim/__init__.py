"""The cluster in virtual time: the same policies and the same costs as the live services, no clock, no I/O.

`workload` says what arrives (`traces` and `arrivals` make workloads), `spec` which instances there are and how they
are run. `cluster.simulate` drives a run: `intake` places requests, `handover` moves them from prefill to decode,
`changes` flips and loses instances. `engine` is one instance's time and `scheduler` its batches, `network` the links.
`outcomes` holds what happened to each request and `metrics` what it amounts to.
"""
