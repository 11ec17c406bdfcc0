"""Methods that find a plan: the papers' planners (`papers`), plain ones to compare with (`simple`) and ours (`best`).

A method is a function that yields ever better plans of a `Search`. Each is written in as few lines as possible: all
share the estimate and the simulator, so that their results can be compared. `registry` has them by name.
"""
