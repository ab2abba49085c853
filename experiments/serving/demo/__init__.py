"""Static and continuous batching of the same requests."""
