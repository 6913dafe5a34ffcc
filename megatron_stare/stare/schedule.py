"""The curves and the controllers behind the entropy gate, as plain functions of numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass


def smoothstep(x: float) -> float:
    """3 x^2 - 2 x^3 on [0, 1], 0 below and 1 above: monotone, with a continuous slope (0 at both ends)."""
    x = min(max(x, 0.0), 1.0)
    return x * x * (3.0 - 2.0 * x)


@dataclass(frozen=True)
class Band:
    """An interval of entropies, and how wide the ramps outside it are. All in nats.

    Below the band the ramp reaches from H_min down to H_min - ramp, above it from
    H_max up to H_max + ramp.
    """

    H_min: float
    H_max: float
    ramp: float

    def inside_fall(self, entropy: float) -> float:
        """From 1 at H_min and below to 0 at H_max and above, smoothly."""
        return smoothstep((self.H_max - entropy) / (self.H_max - self.H_min))

    def below(self, entropy: float) -> float:
        """How far under the band: 0 at H_min and above, 1 at H_min - ramp and below, smooth between."""
        return smoothstep((self.H_min - entropy) / self.ramp)

    def above(self, entropy: float) -> float:
        """How far over the band: 0 at H_max and below, 1 at H_max + ramp and above, smooth between."""
        return smoothstep((entropy - self.H_max) / self.ramp)

    def factor(self, entropy: float, g_min: float, g_max: float) -> float:
        """g: exactly 1 in the band, g_min and g_max past its ramps; monotone, with a continuous slope."""
        return 1.0 - (1.0 - g_min) * self.below(entropy) + (g_max - 1.0) * self.above(entropy)


def sign_step(
    W: float, M: float, error: float, *, alpha: float, W_max: float, M_min: float
) -> tuple[float, float]:
    """The paper's adaptive weights: W and M, one step of alpha by the sign of error = target - H."""
    step = math.copysign(alpha, error) if error != 0 else 0.0
    return min(max(W + step, 1.0), W_max), min(max(M - step, M_min), 1.0)


def pi_step(
    integral: float, error: float, *, kp: float, ki: float, lowest: float, highest: float
) -> tuple[float, float]:
    """One step of the proportional-integral controller: (integral, u), both kept in [lowest, highest].

    Args:
        integral: of the steps so far.
        error: (target - smoothed H) / target.
    """
    wanted = kp * error + integral
    # Anti-windup: while the output is clipped, an error that would push it further
    # out is not collected, else it takes as long to come back as it took to get there.
    if not ((wanted > highest and error > 0) or (wanted < lowest and error < 0)):
        integral = min(max(integral + ki * error, lowest), highest)
    return integral, min(max(kp * error + integral, lowest), highest)
