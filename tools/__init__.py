"""Commands of `polyphase` beside serving: simulation, planning, calibration."""
