"""Asks the servers for samples: a plain call outside, asyncio in a thread inside."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import itertools
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import tenacity

from megatron_stare.config.schema import RolloutSection
from megatron_stare.errors import Preempted, UserError
from megatron_stare.rollout.answer import responses_from
from megatron_stare.rollout.endpoints import Endpoints, RolloutError
from megatron_stare.tasks.sample import Group, Prompt

_POLL_SECONDS = 0.2
# From here on a prompt is read once and its cache shared; below, n copies at once are faster.
SHARED_PROMPT_TOKENS = 128


class _Retryable(Exception):
    """No answer, or one that may be different next time."""


class RolloutClient:
    """Samples responses to prompts.

    Args:
        endpoints: the servers; the router, if there is one, gets all samples but seeded ones.
        rollout: temperature, lengths, retries, time limit.
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
        self._turns = itertools.cycle(range(len(endpoints.servers)))
        self._session: aiohttp.ClientSession | None = None
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

        Args:
            weight_version: the version every token must have been written by; None accepts any.
            should_stop: asked several times a second; once true, what is in flight is aborted.
            on_progress: called with (groups done, groups asked for), from another thread.
            temperature: instead of `rollout.temperature`, for evaluation. 0 is greedy.
            seed: makes responses reproducible where the servers run with enable_deterministic_inference, and
                is ignored by others. Give each step another one.

        Raises:
            UserError: a prompt is empty, too long, or has an id outside the vocabulary. Nothing was sent.
            WeightVersionError: see `weight_version`.
            Preempted: `should_stop` said so.
            RolloutError: no server answered within the retries and the time limit, an answer lacks what
                training needs, or a response was aborted.
        """
        if n < 1:
            raise ValueError(f"n={n} responses a prompt: at least 1")
        for prompt in prompts:
            self._check(prompt)
        if seed is None and self._rollout.server_args.get("enable_deterministic_inference"):
            seed = secrets.randbits(62)  # without one such a server gives all n responses the same noise
        bodies = [self._body(prompt, n, temperature, seed) for prompt in prompts]
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

    def abort(self) -> None:
        """End every request that any server is working on. Servers that do not answer are passed over."""
        for url in self._endpoints.servers:
            with contextlib.suppress(OSError):
                self._endpoints.call(url, "/abort_request", {"rid": "", "abort_all": True}, timeout=5.0)

    def close(self) -> None:
        """Close connections and end the thread. Idempotent."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._close_session(), self._loop).result(timeout=10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10.0)
        self._loop.close()

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, prompt: Prompt) -> None:
        ids, rollout = prompt.token_ids, self._rollout
        if not ids:
            raise UserError(f"prompt {prompt.index} has no token")
        outside = next((token for token in ids if not 0 <= token < self._vocab_size), None)
        if outside is not None:
            raise UserError(
                f"prompt {prompt.index} has token id {outside}, outside the vocabulary of "
                f"{self._vocab_size}: tokenizer and model do not belong together"
            )
        room = rollout.context_length - rollout.max_response_tokens
        if len(ids) > room:
            raise UserError(
                f"prompt {prompt.index} has {len(ids)} tokens; "
                f"rollout.context_length={rollout.context_length} - "
                f"rollout.max_response_tokens={rollout.max_response_tokens} leaves room for {room}"
            )

    async def _generate(
        self,
        prompts: Sequence[Prompt],
        bodies: Sequence[dict[str, Any]],
        n: int,
        weight_version: int | None,
        on_progress: Callable[[int, int], None] | None,
    ) -> list[Group]:
        # Twice what the servers run at once keeps them busy; the rest is not yet theirs to lose.
        running = self._rollout.max_running_requests * len(self._endpoints.servers)
        slots = asyncio.Semaphore(max(1, 2 * running // n))
        done = itertools.count(1)

        async def one(prompt: Prompt, body: dict[str, Any]) -> Group:
            async with slots:
                answer = await self._ask(body)
            responses = responses_from(
                answer,
                n,
                prompt_index=prompt.index,
                vocab_size=self._vocab_size,
                weight_version=weight_version,
            )
            if on_progress is not None:
                on_progress(next(done), len(prompts))
            return Group(prompt, responses)

        try:
            async with asyncio.TaskGroup() as tasks:  # the first error cancels the others
                groups = [tasks.create_task(one(*pair)) for pair in zip(prompts, bodies, strict=True)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [group.result() for group in groups]

    def _body(self, prompt: Prompt, n: int, temperature: float | None, seed: int | None) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            "temperature": self._rollout.temperature if temperature is None else temperature,
            "max_new_tokens": self._rollout.max_response_tokens,
        }
        if self._stop_token_ids:
            sampling["stop_token_ids"] = self._stop_token_ids
        body: dict[str, Any] = {"return_logprob": True, "sampling_params": sampling}
        if seed is None and len(prompt.token_ids) >= SHARED_PROMPT_TOKENS:
            sampling["n"] = n
            return body | {"input_ids": prompt.token_ids}
        if seed is not None:
            seeds = [_response_seed(seed, prompt.index, number) for number in range(n)]
            body["sampling_params"] = [sampling | {"sampling_seed": own} for own in seeds]
        return body | {"input_ids": [prompt.token_ids] * n}

    async def _ask(self, body: dict[str, Any]) -> Any:
        """One request; what may go better elsewhere is tried again, at one server after the other."""
        start = next(self._turns)
        urls = itertools.cycle(self._endpoints.servers[start:] + self._endpoints.servers[:start])
        # sglang-router 0.3.2 refuses a request whose responses have parameters of their own.
        seeded = isinstance(body["sampling_params"], list)
        if self._endpoints.router and not seeded:
            urls = itertools.chain([self._endpoints.router], urls)

        async def attempt() -> Any:
            return await self._post(next(urls), body)

        attempts = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self._rollout.retries + 1),
            wait=tenacity.wait_exponential_jitter(initial=0.5, max=10.0),
            retry=tenacity.retry_if_exception_type(_Retryable),
            reraise=True,
        )
        try:
            return await attempts(attempt)
        except _Retryable as error:
            raise RolloutError(
                f"no server answered in {self._rollout.retries + 1} attempts, the last at {error}; "
                "the logs of the servers and the router are in the run's logs directory"
            ) from error

    async def _post(self, server: str, body: dict[str, Any]) -> Any:
        url = server + "/generate"
        try:
            async with self._connection().post(url, json=body) as response:
                if response.status == 200:
                    return await response.json(content_type=None)
                text = (await response.text())[:500]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            late = f"no answer in {self._rollout.request_timeout:g} s"
            raise _Retryable(f"{url}: {late if isinstance(error, TimeoutError) else error}") from error
        if response.status >= 500 or response.status in (408, 429):
            raise _Retryable(f"{url}: {response.status} {text}")
        raise RolloutError(f"{url}: {response.status} {text}")

    def _connection(self) -> aiohttp.ClientSession:
        if self._session is None:  # made here, because it belongs to the loop's thread
            self._session = aiohttp.ClientSession(
                headers=self._endpoints.headers,
                timeout=aiohttp.ClientTimeout(total=self._rollout.request_timeout, sock_connect=10.0),
                connector=aiohttp.TCPConnector(limit=0),
            )
        return self._session

    async def _close_session(self) -> None:
        if self._session is not None:
            await self._session.close()


def _response_seed(seed: int, prompt: int, number: int) -> int:
    """62 bits that differ for every response and are the same wherever and whenever it is asked for."""
    digest = hashlib.blake2b(f"{seed}/{prompt}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2
