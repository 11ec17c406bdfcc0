"""The cluster monitor: who is in the cluster, how busy, in which role; flips and drains; SLO attainment."""
