"""What each accelerator should do: an inventory, a workload and an SLO in, a plan out."""
