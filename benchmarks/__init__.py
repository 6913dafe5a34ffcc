"""Measurements as ratios: `python -m benchmarks.NAME` prints one JSON line last (see docs/benchmarks.md)."""
