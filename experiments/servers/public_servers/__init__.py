"""Fits of servers' coefficients to measured load stages, and left-out predictions."""
