"""The cluster in virtual time: the same policies and the same costs as the live services, no clock, no I/O.

To run a simulation: `cluster.simulate` makes an `outcomes.SimResult` of a `workload.Workload` (synthetic, or of a trace
by `traces.read_trace`), the instances (`spec.InstanceSpec`; `measured` makes those of running, calibrated ones) and a
`spec.RunSpec`, which may have a `prediction.Prediction`. `metrics` turns the result into figures, and finds goodput.

Inside, from the top: `cluster` is a run, `intake` the gateway and the global scheduler, `fleet` the instances and what
decisions know about them, `instance` one instance with the ports of `wires`, `engine` the time of one engine,
`scheduler` its batches with `memory` and `group`, `request` a request's state, `record` what is written down, `events`
the time. The emulated engine of a worker drives `scheduler`, `memory` and `group`, too.
"""
