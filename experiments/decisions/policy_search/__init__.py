"""Search over the weights of a scheduling policy."""
