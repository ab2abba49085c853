"""Assignment: a policy of continuous batching, served in the simulator."""
