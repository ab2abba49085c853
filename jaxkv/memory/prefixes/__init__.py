"""The prefix cache: entries, order of eviction, and transfer to another pool."""
