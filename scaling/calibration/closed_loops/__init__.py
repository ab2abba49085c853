"""Servers under a constant number of requests: their rows, step times and fits."""
