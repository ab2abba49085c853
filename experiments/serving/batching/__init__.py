"""Static and continuous batching."""
