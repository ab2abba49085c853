"""Load that a chat service sustains with paged memory."""
