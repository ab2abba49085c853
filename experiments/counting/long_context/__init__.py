"""Memory and traffic of a long sequence that is sharded over devices."""
