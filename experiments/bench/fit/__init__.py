"""Bootstrap fits compared with common implementations."""
