"""Bundled heads."""
