"""Page size."""
