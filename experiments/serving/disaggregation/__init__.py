"""What does it buy to read prompts on other GPUs than those that decode?"""
