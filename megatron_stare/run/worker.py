"""One trainer rank: `python -m megatron_stare.run.worker RUN_DIRECTORY` under torchrun."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from megatron_stare.config import load_config
from megatron_stare.errors import Preempted, TrainingFailed, UserError
from megatron_stare.rollout.child import die_with_parent
from megatron_stare.run.files import RunFiles


class StopFlag:
    """Whether the run is asked to save and stop: by a signal to this rank, or by the file for it."""

    def __init__(self, files: RunFiles):
        self.files = files
        self.signalled = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number, _frame) -> None:
        self.signalled = True

    def __call__(self) -> bool:
        return self.signalled or self.files.stop_request.exists()


def main() -> int:
    """Run this rank to its end; rank 0 leaves the outcome for the supervisor."""
    die_with_parent()
    files = RunFiles(Path(sys.argv[1]))
    rank = int(os.environ.get("RANK", "0"))
    log_to_file(files, f"trainer-{rank}", rank)
    # The watchdog asks for all stacks before it ends ranks that hang.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if rank == 0:
        files.outcome.unlink(missing_ok=True)  # of the attempt before this one
    try:
        outcome, message = run(files)
    except UserError as error:
        outcome, message = "refused", str(error)
    except TrainingFailed as error:
        outcome, message = "stopped", str(error)
    except Exception as error:
        traceback.print_exc()
        outcome, message = "failed", f"{type(error).__name__}: {error}"[:500]
    if rank == 0 or outcome == "failed":
        _record(files, rank, outcome, message)
    leave(0 if outcome in ("done", "preempted") else 1)


def leave(code: int) -> NoReturn:
    """End this process now: threads of gloo, and of ranks that failed, need not be waited for.

    Megatron's checkpoint writer keeps a helper process, which only an ordinary exit would end.
    """
    for child in multiprocessing.active_children():
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(files: RunFiles) -> tuple[str, str]:
    """Build the parts, train, save. Returns the outcome and a sentence about it."""
    from megatron_stare.engine.parallel import shut_down
    from megatron_stare.run.build import build_engine, build_session
    from megatron_stare.run.trainer import train, train_supervised

    config = load_config(files.config)
    stop = StopFlag(files)
    session = build_session(config, build_engine(config), files, stop)
    try:
        try:
            (train if config.objective == "rl" else train_supervised)(session)
            outcome = "done"
        except Preempted:
            outcome = "preempted"
        if outcome == "preempted" or config.checkpoint.at_end:
            session.save()
        if outcome == "done" and config.checkpoint.hf_at_end:
            session.export()
    except BaseException:
        session.close("failed")
        raise
    session.close(outcome)
    shut_down()
    return outcome, f"{session.steps_done} of {config.run.steps} steps"


def log_to_file(files: RunFiles, name: str, rank: int) -> None:
    """Send this rank's output to its log; rank 0 keeps standard output for the person who watches."""
    files.logs.mkdir(parents=True, exist_ok=True)
    log = os.open(files.logs / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 2)
    if rank != 0:
        os.dup2(log, 1)


def _record(files: RunFiles, rank: int, outcome: str, message: str) -> None:
    """Leave the outcome; rank 0's word stands, and of the others the first failure's."""
    mode = "w" if rank == 0 and outcome != "failed" else "x"
    with contextlib.suppress(OSError), open(files.outcome, mode, encoding="utf-8") as file:
        json.dump({"outcome": outcome, "message": message, "rank": rank}, file)


if __name__ == "__main__":
    main()
