"""A serving system as a value: pools, tables, schedules and keys in one pytree."""
