"""Cost of paged memory by page size."""
