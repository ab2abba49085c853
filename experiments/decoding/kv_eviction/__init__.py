"""Memory against quality under KV eviction."""
