"""Pages and states of sequences: the prefix cache, swapping, recurrent states."""
