"""Kernel launches of an engine step on a GPU, counted without one."""
