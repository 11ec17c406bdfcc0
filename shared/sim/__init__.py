"""The cluster in virtual time: the same policies and the same costs as the live services, no clock, no I/O.

What drives a simulation needs these modules, and no others of this folder:

- `workload.Workload`: what arrives; `traces.read_trace` reads one, `arrivals` makes one, `made` by its words,
  `prediction.Prediction` says how well output lengths are foreseen
- `spec.InstanceSpec`, `spec.RunSpec`: which instances there are and how they are run; `pipeline.Pipeline` for one whose
  layers lie on unlike accelerators, `measured` for specs of calibrated instances that run
- `cluster.simulate`: a run, from those two to a `SimResult`
- `outcomes.SimResult`: what happened to each request; `metrics`: what it amounts to, and the goodput

Inside, top-down: `cluster` puts a run together. `intake` places requests, `handover` moves them from prefill to
decode, `changes` flips and loses instances. `legs` has requests on engines, `fleet` the instances and what decisions
know of them, `record` what is written down, `events` the time. `instance` is one instance with its port, `engine` one
engine's time, `scheduler` its batches with `waiting`, `memory`, `group` and `glide`. `request` is a request's state.
"""
