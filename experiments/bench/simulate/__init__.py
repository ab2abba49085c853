"""The simulation beside a scheduler in plain Python."""
