"""Peers of the kernels in other frameworks, each in a process of its own."""
