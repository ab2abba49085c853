"""Assignment: from a sweep of small runs to the design for a large budget."""
