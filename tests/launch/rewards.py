"""A user's reward, found from where the job was launched."""

from __future__ import annotations


def share_of_digits(response: str, answer: object) -> float:
    """Of a response's characters: untrained models' responses differ in it, so there is a gradient."""
    return sum(character.isdigit() for character in response) / max(len(response), 1)
