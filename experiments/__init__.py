"""One module per question, and the only command line."""
