"""Our fits beside the usual ones."""
