"""Time and memory of tiled attention."""
