"""What a step of the engine launches on a GPU, counted without one."""
