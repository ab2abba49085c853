"""Disaggregation."""
