"""`polyphase simulate`: what a cluster file, or a cluster that exists only on paper, would do with a workload.

`sim_file` and `from_cluster` read the two kinds of file, and `deployment` makes instances of their entries; `workloads`
makes the requests, `session` runs, `report` and `page` show.
"""
