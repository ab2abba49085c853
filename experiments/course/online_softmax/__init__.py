"""Assignment: attention over blocks of keys with an online softmax."""
