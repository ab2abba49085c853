"""The command `jaxkv calibrate`: a server's step times, fitted to measured runs."""
