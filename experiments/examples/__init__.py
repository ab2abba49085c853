"""Programs to copy from: each runs as it is, `python -m experiments.examples.NAME`."""
