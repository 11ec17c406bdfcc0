"""What nobody serves with: benches, the papers, the demonstration, simulation, calibration, fitting."""
