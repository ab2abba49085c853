"""The cheapest model to train and to serve."""
