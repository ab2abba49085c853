"""Bytes, loss and decode rate of weights in 8 and 4 bits."""
