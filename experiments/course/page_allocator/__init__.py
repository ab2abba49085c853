"""Assignment: a page allocator with copy-on-write."""
