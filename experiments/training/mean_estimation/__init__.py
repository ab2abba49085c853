"""Mean estimation."""
