"""Fits of the cost model: operator tables and recorded steps to coefficients."""
