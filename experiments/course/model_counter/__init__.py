"""Assignment: parameters, FLOPs and memory of a transformer from its shape."""
