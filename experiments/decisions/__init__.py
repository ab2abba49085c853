"""Decisions: policies, futures of one state, and models to train and to serve."""
