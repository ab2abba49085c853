"""Bounds for numbers on serving that the lectures quote."""
