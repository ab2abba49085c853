"""Page tables."""
