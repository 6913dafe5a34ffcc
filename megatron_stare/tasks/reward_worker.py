"""A process that computes rewards, one after the other, for reward_pool.py. Run as a script.

Protocol over the socket whose descriptor is the only argument. First a setup
message in; ("ready", None) or ("failed", message) out. Then, again and again:
(number of calls, pickled list of RewardCall) in, and for each call, as soon as
it is done, (reward, None) or (None, message) out.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

PR_SET_PDEATHSIG = 1


def main(descriptor: int) -> None:
    _die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Schedulers send SIGTERM to every process of a job; while the trainer still saves, rewards must work.
        # The parent ends workers by SIGKILL. A handler, unlike SIG_IGN, is not inherited by programs run.
        signal.signal(number, lambda *_: None)
    connection = Connection(descriptor)
    setup = connection.recv()
    # The parent's own search path: this script knows nothing of where the package or the user's modules lie.
    sys.path[:] = setup["path"]
    from megatron_stare.tasks.lookup import describe
    from megatron_stare.tasks.rewards import as_number, make_reward

    try:
        reward = make_reward(**setup["reward"])
    except BaseException as error:
        connection.send(("failed", str(error) if type(error).__name__ == "UserError" else describe(error)))
        return
    connection.send(("ready", None))

    def value_of(call: Any) -> tuple[float | None, str | None]:
        try:
            return as_number(reward(call)), None
        except BaseException as error:  # sys.exit() in a reward is that reward's error too
            return None, describe(error)

    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent closed: the end
        while True:
            count, payload = connection.recv()
            try:
                calls = pickle.loads(payload)
            except Exception as error:
                message = f"the row cannot be sent to a reward process: {describe(error)}"
                calls = []
                for _ in range(count):
                    connection.send((None, message))
            for call in calls:
                connection.send(value_of(call))


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent's thread ends, even while code hangs with the GIL."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux: the end of the socket has to do
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
