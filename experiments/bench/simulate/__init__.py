"""Simulator speed compared with a scheduler in plain Python."""
