"""Experiments on serving: measured with the engine, or simulated."""
