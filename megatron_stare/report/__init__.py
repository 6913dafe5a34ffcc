"""Reports of a run: metrics file, console, TensorBoard, wandb, pictures, summary."""

from __future__ import annotations

from megatron_stare.report.metrics import read_metrics
from megatron_stare.report.plots import plot_comparison, plot_entropy
from megatron_stare.report.reporter import Reporter
from megatron_stare.report.summary import fifths, summarise

__all__ = ["Reporter", "fifths", "plot_comparison", "plot_entropy", "read_metrics", "summarise"]
