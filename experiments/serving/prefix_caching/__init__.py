"""Hit rates of the prefix cache by size, order and eviction rule."""
