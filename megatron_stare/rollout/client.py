"""Asks the servers for samples: a plain call outside, asyncio in a thread inside."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from megatron_stare.config.schema import RolloutSection
from megatron_stare.errors import Preempted
from megatron_stare.rollout.answer import AbortedError, WeightVersionError, responses_from
from megatron_stare.rollout.endpoints import Endpoints, RolloutError
from megatron_stare.rollout.request import check_prompt, is_seeded, request_body
from megatron_stare.rollout.rotation import PROBE_SECONDS, Late, NoAnswer, Rotation, StaleServersError
from megatron_stare.rollout.threads import in_thread
from megatron_stare.tasks.sample import Group, Prompt, Response

_POLL_SECONDS = 0.2
_ABORT_SECONDS = 3.0


class RolloutClient:
    """Samples responses to prompts.

    Args:
        endpoints: the servers; the router, if there is one, gets the samples while all servers are up and
            current, except seeded ones.
        rollout: temperature, lengths, time limits.
        vocab_size: token ids the model knows. One beyond ends a server, so it is never sent.
        stop_token_ids: ids that end a response, besides those in the model's own config.

    Sampled at `rollout.temperature` from the whole distribution; log-probs are of that distribution.
    Not to be shared by threads. close() it, or use it as a context manager.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        rollout: RolloutSection,
        vocab_size: int,
        *,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        self._endpoints = endpoints
        self._rollout = rollout
        self._vocab_size = vocab_size
        self._stop_token_ids = list(stop_token_ids)
        self._calls = itertools.count()
        # One a URL, so that what is under way to a lost machine can be broken off.
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-client", daemon=True)
        self._thread.start()

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        *,
        weight_version: int | None = None,
        should_stop: Callable[[], bool] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> list[Group]:
        """`n` responses to each prompt, groups in the order of `prompts`.

        A request that a server does not answer well (it dies, aborts, has other weights) goes to another.

        Args:
            weight_version: the version every token must have been written by; None accepts any.
            should_stop: asked several times a second; once true, what is in flight is aborted.
            on_progress: called with (groups done, groups asked for), from another thread.
            temperature: instead of `rollout.temperature`, for evaluation. 0 is greedy.
            seed: makes responses reproducible with `rollout.seeded`; servers without it ignore it. Give each
                step another one.

        Raises:
            UserError: a prompt is empty, too long, or has an id outside the vocabulary. Nothing was sent.
            Preempted: `should_stop` said so.
            StaleServersError: servers answer, but with other weights. Holds what was finished before.
            RolloutError: no good answer from anyone for `rollout.outage_timeout`, or one that no other server
                would better: a request refused as wrong, or an answer that lacks what training needs.
        """
        if n < 1:
            raise ValueError(f"n={n} responses a prompt: at least 1")
        for prompt in prompts:
            check_prompt(prompt, self._rollout, self._vocab_size)
        if seed is None and self._servers_take_seeds:
            seed = secrets.randbits(62)  # without one such a server gives all n responses the same noise
        bodies = [
            request_body(
                prompt, n,
                temperature=self._rollout.temperature if temperature is None else temperature,
                max_new_tokens=self._rollout.max_response_tokens,
                stop_token_ids=self._stop_token_ids,
                seed=seed,
            )
            for prompt in prompts
        ]  # fmt: skip
        work = self._generate(prompts, bodies, n, weight_version, on_progress)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while not concurrent.futures.wait([future], timeout=_POLL_SECONDS).done:
                if should_stop is not None and should_stop():
                    raise Preempted("sampling was stopped")
            return future.result()
        except BaseException:  # an error, a stop, Ctrl-C: the servers must not go on for nobody
            future.cancel()
            self.abort()
            raise

    @property
    def _servers_take_seeds(self) -> bool:
        further = self._rollout.server_args
        return self._rollout.seeded or bool(further.get("enable_deterministic_inference"))

    def abort(self) -> None:
        """End every request that any server is working on. Servers that do not answer are passed over."""
        body = {"rid": "", "abort_all": True}
        calls = [
            in_thread(self._endpoints.call, url, "/abort_request", body, timeout=_ABORT_SECONDS)
            for url in self._endpoints.servers
        ]
        concurrent.futures.wait(calls, timeout=_ABORT_SECONDS)

    def close(self) -> None:
        """Close connections and end the thread. Idempotent."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._close_sessions(), self._loop).result(timeout=10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10.0)
        self._loop.close()

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _generate(
        self,
        prompts: Sequence[Prompt],
        bodies: Sequence[dict[str, Any]],
        n: int,
        weight_version: int | None,
        on_progress: Callable[[int, int], None] | None,
    ) -> list[Group]:
        if not prompts:
            return []
        rotation = Rotation(
            self._endpoints.servers,
            self._endpoints.router,
            version=weight_version,
            outage_timeout=self._rollout.outage_timeout,
            health_timeout=self._rollout.health_timeout,
            probe=self._probe,
            let_go=self._let_go,
            turn=next(self._calls),
        )
        # Twice what the servers run at once keeps them busy; the rest is not yet theirs to lose.
        running = self._rollout.max_running_requests * len(self._endpoints.servers)
        slots = asyncio.Semaphore(max(1, 2 * running // n))
        done = itertools.count(1)

        async def one(prompt: Prompt, body: dict[str, Any]) -> Group:
            async with slots:
                responses = await self._ask(rotation, prompt, body, n, weight_version)
            if on_progress is not None:
                on_progress(next(done), len(prompts))
            return Group(prompt, responses)

        groups: list[asyncio.Task[Group]] = []
        try:
            async with asyncio.TaskGroup() as tasks:  # the first error cancels the others
                watching = tasks.create_task(rotation.watch())
                groups = [tasks.create_task(one(*pair)) for pair in zip(prompts, bodies, strict=True)]
                await asyncio.wait(groups)
                watching.cancel()
        except BaseExceptionGroup as errors:
            error = errors.exceptions[0]
            if isinstance(error, StaleServersError):
                good = [not task.cancelled() and task.exception() is None for task in groups]
                error.groups = [
                    task.result() if finished else None for task, finished in zip(groups, good, strict=True)
                ]
            raise error from None
        return [group.result() for group in groups]

    async def _ask(
        self, rotation: Rotation, prompt: Prompt, body: dict[str, Any], n: int, weight_version: int | None
    ) -> list[Response]:
        """One request; what may go better elsewhere is tried again."""
        while True:
            url = await rotation.take(direct=is_seeded(body))
            begun = time.monotonic()
            try:
                responses = responses_from(
                    await self._post(url, body),
                    n,
                    prompt_index=prompt.index,
                    vocab_size=self._vocab_size,
                    weight_version=weight_version,
                )
            except (NoAnswer, AbortedError) as problem:
                rotation.failed(url, begun, problem)
            except WeightVersionError as problem:
                rotation.failed(url, begun, problem, stale=True)
            else:
                rotation.good(url)
                return responses

    async def _post(self, server: str, body: dict[str, Any]) -> Any:
        url = server + "/generate"
        try:
            async with self._session(server).post(url, json=body) as response:
                if response.status == 200:
                    return await response.json(content_type=None)
                text = (await response.text())[:500]
        except TimeoutError as error:
            raise Late(f"{url}: no answer in {self._rollout.request_timeout:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: an answer that was cut off
            raise NoAnswer(f"{url}: {error}") from error
        if response.status >= 500 or response.status in (408, 429):
            raise NoAnswer(f"{url}: {response.status} {text}")
        raise RolloutError(f"{url}: {response.status} {text}")

    async def _probe(self, url: str) -> str | None:
        """The weight version that a server says it serves; None from the router. Raises NoAnswer."""
        is_router = url == self._endpoints.router
        path = "/readiness" if is_router else "/model_info"
        limit = aiohttp.ClientTimeout(total=PROBE_SECONDS)
        try:
            async with self._session(url).get(url + path, timeout=limit) as response:
                if response.status != 200:
                    raise NoAnswer(f"{url}{path}: {response.status} {(await response.text())[:200]}")
                return None if is_router else (await response.json(content_type=None)).get("weight_version")
        except TimeoutError as error:
            raise Late(f"{url}{path}: no answer in {PROBE_SECONDS:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise NoAnswer(f"{url}{path}: {error}") from error

    def _session(self, url: str) -> aiohttp.ClientSession:
        if url not in self._sessions:  # made here, because it belongs to the loop's thread
            self._sessions[url] = aiohttp.ClientSession(
                headers=self._endpoints.headers,
                timeout=aiohttp.ClientTimeout(total=self._rollout.request_timeout, sock_connect=10.0),
                connector=aiohttp.TCPConnector(limit=0),
            )
        return self._sessions[url]

    async def _let_go(self, url: str) -> None:
        """Break off all that is under way to `url`."""
        session = self._sessions.pop(url, None)
        if session is not None:
            await session.close()

    async def _close_sessions(self) -> None:
        for url in list(self._sessions):
            await self._let_go(url)
