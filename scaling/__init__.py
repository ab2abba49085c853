"""Scaling laws: costs, fits, training runs, sweeps and compute-optimal budgets."""
