"""What each accelerator should do: an inventory, a workload and an SLO in, a plan out.

`problem` is the question and `answer` the answer. In between, `compose` and `methods` propose deployments, `estimate`
with `routes` says in closed form what they serve, and `judge` runs the promising ones in the simulator. `running` does
the same for a cluster that runs, from what its instances measured.
"""
