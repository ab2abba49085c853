"""The commands `jaxkv compare` and `jaxkv next`, which read a log of runs."""
