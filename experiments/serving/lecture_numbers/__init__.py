"""Lecture numbers."""
