"""Cost of a token with and without a KV cache."""
