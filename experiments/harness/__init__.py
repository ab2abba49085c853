"""Shared tools of experiments: engines, models, prompts, cost models, timing."""

__all__ = [
    "bundled",
    "cost_models",
    "kernels",
    "length_distributions",
    "model_shapes",
    "named_costs",
    "prompts",
    "sentence_model",
    "serving",
    "sharded_steps",
    "stepper",
    "sweep_tables",
    "terminal_text",
    "timing",
]
