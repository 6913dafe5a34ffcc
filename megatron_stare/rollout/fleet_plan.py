"""Who starts what where, for a fleet over several nodes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class FleetPlan:
    """One node's part of a fleet whose addresses are known beforehand, the same on every node.

    Attributes:
        urls: base URL of every server of the job, in order: http://HOST:PORT.
        mine: indices of those that this process starts; may be empty.
        router: the router's URL; None where there is none.
        starts_router: this is the head node: it starts the router, if there is one, and waits for the
            servers of all nodes.
        api_key: what servers and router demand. Not shown in repr.
        bind: the address of this node, which its servers and router listen on, and where a trainer on this
            node is met for weight updates.
    """

    urls: tuple[str, ...]
    mine: range
    router: str | None
    starts_router: bool
    api_key: str = field(repr=False)
    bind: str

    def __post_init__(self) -> None:
        if not self.urls:
            raise ValueError("a plan without servers")
        if self.mine and not 0 <= self.mine[0] <= self.mine[-1] < len(self.urls):
            raise ValueError(f"servers {self.mine} of {len(self.urls)}")
