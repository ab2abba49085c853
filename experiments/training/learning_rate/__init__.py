"""Best learning rate by width and tokens."""
