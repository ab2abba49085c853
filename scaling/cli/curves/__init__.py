"""`jaxkv fit CURVES --law schedule`: laws of whole training curves."""
