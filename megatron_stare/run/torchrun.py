"""torchrun, ended by the kernel when the supervisor dies: no rank outlives its run."""

from __future__ import annotations

from torch.distributed.run import main

from megatron_stare.rollout.child import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    main()
