"""Decisions that need both halves of the project: training and serving."""
