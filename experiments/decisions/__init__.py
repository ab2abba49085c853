"""Experiments on decisions: what another policy, size or budget would have given."""
