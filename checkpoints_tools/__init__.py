"""Commands that make or convert checkpoints: `python -m checkpoints_tools.NAME`."""
