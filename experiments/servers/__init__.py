"""Servers as their clients see them: calibrated predictions, agent traffic."""
