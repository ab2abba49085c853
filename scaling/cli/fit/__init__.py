"""The command `jaxkv fit`: fits of scaling laws to a log, as a run folder."""
