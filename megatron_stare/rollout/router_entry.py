"""`python -m megatron_stare.rollout.router_entry ARGS`: sglang-router, the API key by environment."""

from __future__ import annotations

import dataclasses
import sys

from megatron_stare.rollout import child


def main(arguments: list[str]) -> None:
    """Route until a signal ends it. ARGS are sglang-router's own."""
    from sglang_router.launch_router import launch_router, parse_router_args

    launch_router(dataclasses.replace(parse_router_args(arguments), api_key=child.api_key()))


if __name__ == "__main__":
    child.die_with_parent()
    main(sys.argv[1:])
