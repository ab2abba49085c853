"""Mixture-of-experts against dense models."""
