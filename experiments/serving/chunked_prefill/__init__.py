"""What do users feel of how prompts are read, and what does reading in chunks buy?"""
