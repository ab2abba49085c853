"""Error of a mean by number of samples."""
