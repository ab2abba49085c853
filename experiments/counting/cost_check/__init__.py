"""Check of the cost formulas against JAX and XLA."""
