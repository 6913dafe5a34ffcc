"""RL post-training on Megatron-core with SGLang rollouts and STARE (arXiv 2606.19236)."""

__version__ = "0.1.0"
