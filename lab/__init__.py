"""Tools beside the serving processes: benchmarks, paper reproductions, the demo, simulation, calibration, fitting."""
