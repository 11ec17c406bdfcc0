"""What each accelerator should do: an inventory, a workload and an SLO in, a plan out.

`problem` is the question. `compose` and `methods` propose deployments, `estimate` (with `routes`) predicts in
closed form what they serve, and `evaluate` runs the promising ones in the simulator. `find` goes from a request to the
plan and its cluster file. `running` does the same for a cluster that runs, from what its instances measured.
"""
