"""Example programs to copy; each runs as `python -m experiments.examples.NAME`."""
