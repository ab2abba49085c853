"""Time from the start of a process to its first answer."""
