"""What a batch costs on an accelerator: catalogue, model geometry, operator times, steps, transfers, calibration."""
