"""Samples from real SGLang servers, and new weights to them.

Names are loaded on first use: the servers' own processes import this package
before anything heavy may be loaded.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Endpoints": "endpoints",
    "RolloutError": "endpoints",
    "ServerFleet": "server",
    "FleetPlan": "fleet_plan",
    "RolloutClient": "client",
    "StaleServersError": "rotation",
    "WeightVersionError": "answer",
    "Publisher": "sync",
    "PublishError": "sync",
    "make_publisher": "sync",
}

__all__ = list(_HOMES)  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
