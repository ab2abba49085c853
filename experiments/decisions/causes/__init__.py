"""Assumptions that would explain numbers that are not reproduced."""
