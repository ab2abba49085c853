"""Expert parallelism against tensor parallelism."""
