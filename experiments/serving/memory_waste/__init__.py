"""Memory utilisation of a serving GPU."""
