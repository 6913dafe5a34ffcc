"""The program around the parts: supervisor, trainer ranks, the loop."""
