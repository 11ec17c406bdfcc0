"""`polyphase simulate`: what a cluster file, or a cluster that exists only on paper, would do with a workload.

`sim_file` and `from_cluster` read the two forms of file, `deployment` makes instances of what they say, `workloads` and
`policy_words` read what the command line says of requests and policies, `session` runs, `report` and `plots` show.
"""
