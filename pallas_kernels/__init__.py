"""Attention over paged KV arrays: arrays in, arrays out, with a plain reference."""
