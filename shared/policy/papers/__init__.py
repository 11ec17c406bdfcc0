"""Policies of the five papers that Polyphase reproduces, a module for each paper, to compare with and for
`benchmarks/papers`. Policies of the papers that are also a usual baseline (`least_load`, `round_robin`, `power_of_two`,
`sjf`, `ljf`) stand with the other policies of their kind. R and F mark what the print leaves open: R a reading of it,
F a gap that was filled.
"""
