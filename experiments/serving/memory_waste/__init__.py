"""Memory waste."""
