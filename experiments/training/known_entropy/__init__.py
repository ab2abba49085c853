"""Losses on a language of known entropy."""
