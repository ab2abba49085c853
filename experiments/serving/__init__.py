"""Experiments on serving: measured with the engine, or simulated."""

__all__ = ["chatbot", "disaggregation", "latency_vs_rate"]
