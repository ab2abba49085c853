"""All that a GPU is asked, in pieces that several calls share."""
