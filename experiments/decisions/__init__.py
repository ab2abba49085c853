"""Decisions by search: policies, branches of an engine, total cost."""
