"""Memory that sequences with a common prefix share."""
