"""Transformers against other architectures and optimizers."""
