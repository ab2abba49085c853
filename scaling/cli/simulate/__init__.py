"""The command `jaxkv simulate`."""
