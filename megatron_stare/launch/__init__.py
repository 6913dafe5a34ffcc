"""Runs on several nodes: files for Slurm, Kubernetes and starts by hand, and what a node does first."""
