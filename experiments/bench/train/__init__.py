"""Training rates compared with PyTorch."""
