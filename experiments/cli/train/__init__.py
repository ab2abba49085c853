"""`jaxkv train` and `jaxkv sweep`."""
