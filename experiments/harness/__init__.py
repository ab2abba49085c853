"""Ways to serve a workload and watch it, and models to serve."""

__all__ = [
    "bundled",
    "cost_models",
    "divided_steps",
    "kernels",
    "length_distributions",
    "model_shapes",
    "named_costs",
    "prompts",
    "sentences",
    "serving",
    "showing",
    "stepping",
    "sweep_tables",
    "timing",
]
