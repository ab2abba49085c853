"""Walk-through of page tables, frame by frame."""
