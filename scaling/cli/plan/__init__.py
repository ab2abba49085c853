"""The command `jaxkv plan`."""
