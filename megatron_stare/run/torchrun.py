"""torchrun, ended by the kernel when the supervisor dies: no rank outlives its run."""

from __future__ import annotations

import signal
import sys

from torch.distributed.run import main

from megatron_stare.rollout.child import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    # Slurm signals every process of a job. The ranks save then, and torchrun must not end them for it; ranks
    # that are still starting inherit this until they have a handler of their own.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    main(["--signals-to-handle", "SIGHUP,SIGQUIT", *sys.argv[1:]])
