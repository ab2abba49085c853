"""Cost of preemption: recomputation and swapping."""
