"""The commands `jaxkv train` and `jaxkv sweep`."""
