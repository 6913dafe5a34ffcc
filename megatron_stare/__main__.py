"""`python -m megatron_stare` is the command `megatron-stare`."""

from __future__ import annotations

from megatron_stare.cli import main

if __name__ == "__main__":
    main()
