"""Long experiments, each one command; their results are in docs/."""
