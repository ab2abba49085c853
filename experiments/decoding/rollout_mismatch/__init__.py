"""Differences between the probabilities of a sampler and of a trainer."""
