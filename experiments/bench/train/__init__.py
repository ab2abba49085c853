"""Our training beside PyTorch's."""
