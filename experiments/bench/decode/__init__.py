"""Our engine beside others."""
