"""Where the servers are, in one class that travels to trainer ranks by environment, and how to call one."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_stare.rollout.child import API_KEY_VARIABLE

_SERVERS_VARIABLE = "MEGATRON_STARE_SERVERS"
_ROUTER_VARIABLE = "MEGATRON_STARE_ROUTER"
_RENDEZVOUS_VARIABLE = "MEGATRON_STARE_RENDEZVOUS"
# Servers are on this machine or the job's own network: a proxy from the environment is never meant for them.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class RolloutError(RuntimeError):
    """Sampling or a weight update failed; the message says which server, what it answered and what to do."""


@dataclass(frozen=True)
class Endpoints:
    """Addresses of a fleet.

    Attributes:
        servers: base URL of every SGLang server. Weight updates, pause and abort go to each of them.
        router: base URL of sglang-router; None where samples are asked of the servers directly.
        api_key: bearer token that all of them demand; None for servers without one. Not shown in repr.
        rendezvous: address of this node where the servers meet the trainer for a weight update; None:
            rollout.host.
    """

    servers: list[str]
    router: str | None = None
    api_key: str | None = field(default=None, repr=False)
    rendezvous: str | None = None

    @property
    def sampling(self) -> list[str]:
        """URLs to send samples to, in turn."""
        return [self.router] if self.router else list(self.servers)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def to_env(self) -> dict[str, str]:
        """Environment variables for another process. The key is in no file and on no command line."""
        values = {
            _SERVERS_VARIABLE: " ".join(self.servers),
            _ROUTER_VARIABLE: self.router,
            API_KEY_VARIABLE: self.api_key,
            _RENDEZVOUS_VARIABLE: self.rendezvous,
        }
        return {name: value for name, value in values.items() if value}

    @classmethod
    def from_env(cls, environment: Mapping[str, str] | None = None) -> Endpoints:
        """The inverse of to_env(). Raises RolloutError where no servers are named."""
        environment = os.environ if environment is None else environment
        servers = environment.get(_SERVERS_VARIABLE, "").split()
        if not servers:
            raise RolloutError(f"{_SERVERS_VARIABLE} is not set: this process was told of no SGLang server")
        others = (_ROUTER_VARIABLE, API_KEY_VARIABLE, _RENDEZVOUS_VARIABLE)
        return cls(servers, *(environment.get(name) for name in others))

    def call(
        self, url: str, path: str, body: Mapping[str, Any] | None = None, *, timeout: float
    ) -> tuple[int, Any]:
        """One request to one server: POST if there is a body, else GET.

        Returns the HTTP status and the answer, parsed where it is JSON. Raises OSError when nothing
        answers within `timeout` seconds.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self.headers}
        request = urllib.request.Request(url + path, data=data, headers=headers)
        try:
            with _opener.open(request, timeout=timeout) as answer:
                status, text = answer.status, answer.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode(errors="replace")
        except http.client.HTTPException as error:  # cut off in the midst
            raise ConnectionError(f"{type(error).__name__} {error}") from error
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def require(self, url: str, path: str, body: Mapping[str, Any] | None = None, *, timeout: float) -> Any:
        """As call(), but anything other than a success is a RolloutError that quotes the answer."""
        try:
            status, answer = self.call(url, path, body, timeout=timeout)
        except OSError as error:
            raise RolloutError(f"{url}{path}: no answer ({error})") from error
        if status != 200 or (isinstance(answer, dict) and answer.get("success") is False):
            raise RolloutError(f"{url}{path}: {status} {str(answer)[:500]}")
        return answer
