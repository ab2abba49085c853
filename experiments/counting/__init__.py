"""Counts of formulas, compared with programs and published numbers."""
