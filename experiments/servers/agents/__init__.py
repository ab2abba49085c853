"""Agent sessions under several orders of the queue."""
