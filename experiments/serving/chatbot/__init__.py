"""Load that a chat service sustains with paged memory."""

__all__ = ["experiment"]
