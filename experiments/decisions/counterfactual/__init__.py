"""One state of an engine under load, continued under many policies."""
