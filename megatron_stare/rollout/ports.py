"""Free ports that no other run on this machine takes between choosing and binding."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

from megatron_stare.errors import UserError

# Below the kernel's range for outgoing connections, which could otherwise take a chosen port.
_RANGE = range(20_000, 32_000)


def require_free(host: str, port: int, source: str) -> None:
    """Raise UserError naming `source`, which asks for it, when `port` on `host` cannot be used."""
    try:
        with _bound(host, port):
            pass
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        message = f"{source}: port {port} on {host} {reason}; choose another or leave it out"
        raise UserError(message) from None


class PortLease:
    """Ports held for this process's fleet.

    A port that is free now can be taken by another run before the server, which first loads for
    half a minute, binds it; weights would then go to the other's server. So each port is also an
    exclusive lock on a file, which the kernel drops with this process.
    """

    def __init__(self) -> None:
        self._directory = Path(tempfile.gettempdir()) / f"megatron_stare-ports-{os.getuid()}"
        self._files: list[int] = []

    def take(self, host: str) -> int:
        """A port that is free on `host` and leased by nobody. Raises OSError if there is none."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for port in random.sample(_RANGE, 1000):
            if not self._lock(port):
                continue
            with contextlib.suppress(OSError), _bound(host, port):
                return port
        raise OSError(errno.EADDRINUSE, f"no free port in {_RANGE.start}-{_RANGE.stop} on {host}")

    def hold(self, port: int) -> None:
        """Keep `port`, chosen elsewhere, from being taken. Raises UserError if another run holds it."""
        if not self._lock(port):
            raise UserError(f"port {port} belongs to another run on this machine; choose another")

    def _lock(self, port: int) -> bool:
        file = os.open(self._directory / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            return False
        self._files.append(file)
        return True

    def release(self) -> None:
        """Give all ports back. Idempotent."""
        while self._files:
            os.close(self._files.pop())


@contextlib.contextmanager
def _bound(host: str, port: int):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        yield
