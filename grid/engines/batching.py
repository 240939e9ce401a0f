"""A model of continuous batching with chunked prefill and a paged KV cache. Pure: no clock, no text.

One `Batch` owns all its requests. The caller asks `begin_step` how long the next step takes, lets that
time pass, and then collects from `end_step` which requests have a new token.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

BLOCK_TOKENS = 16
"""Tokens of one KV block, and the grain of prefix reuse; vLLM's default on GPUs."""

STEP_TOKENS = 2048
"""Tokens computed in one step at most: running decodes first, prefill chunks with what is left."""


@dataclass(frozen=True, slots=True)
class Speed:
    """How long a step takes: the longer of computing and of reading memory, plus a fixed part."""

    prefill_tokens_per_s: float
    weights_read_s: float
    kv_read_s_per_token: float
    overhead_s: float

    def step_s(self, new_tokens: int, context_tokens: int) -> float:
        computing = new_tokens / self.prefill_tokens_per_s
        reading = self.weights_read_s + context_tokens * self.kv_read_s_per_token
        return max(computing, reading) + self.overhead_s


@dataclass(slots=True, eq=False)
class Request:
    """One generation in the batch. Its batch alone writes to it, save for what the caller put in."""

    prompt_ids: Sequence[int]
    """Prompt and, for a continuation, the ids that were emitted before."""
    salt: str
    max_new_tokens: int
    priority: int = 0
    """Lower goes first."""
    order: int = 0
    generated: int = 0
    computed: int = 0
    """Tokens whose KV is in the cache."""
    cached_tokens: int = 0
    unbilled_s: float = 0.0
    """Its share of step time since that was last taken."""
    chunk: int = 0
    """Tokens that the current step computes for it."""
    running: bool = False
    finished: bool = False
    total: int = 0
    """Prompt and generated tokens."""
    room: int = 0
    """Tokens that its blocks hold."""
    blocks: list[int] = field(default_factory=list)
    """Shared prompt blocks that it holds, by hash."""
    private_blocks: int = 0

    def __post_init__(self) -> None:
        self.total = len(self.prompt_ids)

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one comes out; 1 while decoding."""
        return self.total - self.computed

    def take_seconds(self) -> float:
        seconds, self.unbilled_s = self.unbilled_s, 0.0
        return seconds


class Batch:
    def __init__(
        self, speed: Speed, *, max_running: int, kv_tokens: int, step_tokens: int = STEP_TOKENS
    ) -> None:
        self._speed = speed
        self._max_running = max_running
        self._step_tokens = step_tokens
        self._kv = _BlockPool(kv_tokens // BLOCK_TOKENS)
        self._running: list[Request] = []
        self._waiting: list[tuple[int, int, Request]] = []
        self._orders = 0
        self.steps = 0
        self.scheduled_tokens = 0
        """Of the newest step: how many tokens it computes, and for how many requests."""
        self.scheduled_requests = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        """Looked up in the cache of prompt blocks so far."""
        self.cached_tokens = 0
        """Of them, found there."""

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_tokens_total(self) -> int:
        return self._kv.total * BLOCK_TOKENS

    @property
    def kv_tokens_free(self) -> int:
        """Including cached blocks that nobody holds, which are given up on demand."""
        return self._kv.free * BLOCK_TOKENS

    def forget(self) -> None:
        """Drop all cached prompt blocks that nobody holds."""
        self._kv.forget()

    @property
    def prefill_tokens_queued(self) -> int:
        running = sum(request.pending for request in self._running if request.pending > 1)
        return running + sum(request.pending for _, _, request in self._waiting)

    def add(self, request: Request) -> None:
        """Take a request in; it must fit the KV cache alone, its answer included."""
        assert request.total + request.max_new_tokens <= self.kv_tokens_total, "checked by the engine"
        self._orders += 1
        request.order = self._orders
        heapq.heappush(self._waiting, (request.priority, request.order, request))

    def abort(self, request: Request) -> None:
        """Drop a request and free what it holds, at once; one that has ended is left alone."""
        if request.finished:
            return
        request.finished = True
        if request.running:
            self._stop(request)
        else:
            self._waiting = [entry for entry in self._waiting if entry[2] is not request]
            heapq.heapify(self._waiting)

    def begin_step(self) -> float:
        """Schedule the next step and return its length in seconds; there must be work."""
        budget = self._step_tokens
        for request in list(self._running):
            if budget == 0:
                break
            if request.total >= request.room and request.running:
                self._grow(request)
            if request.running:
                request.chunk = min(request.total - request.computed, budget)
                budget -= request.chunk
        budget = self._admit(budget)
        scheduled = [request for request in self._running if request.chunk]
        self.scheduled_tokens = self._step_tokens - budget
        self.scheduled_requests = len(scheduled)
        seconds = self._speed.step_s(self.scheduled_tokens, sum(request.computed for request in scheduled))
        share = seconds / max(1, len(scheduled))
        for request in scheduled:
            request.unbilled_s += share
        return seconds

    def end_step(self) -> list[Request]:
        """Finish the step; return the requests that have one new token each, in order of admission.

        A request whose `finished` is set has just produced its last token and left the batch.
        """
        self.steps += 1
        out: list[Request] = []
        for request in self._running:
            chunk = request.chunk
            if not chunk:
                continue
            request.chunk = 0
            request.computed += chunk
            if chunk > 1:
                self._kv.mark_ready(request.blocks[: request.computed // BLOCK_TOKENS])
            if request.computed == request.total:
                request.generated += 1
                request.total += 1
                out.append(request)
        for request in out:
            if request.generated == request.max_new_tokens:
                self.abort(request)
        return out

    def _admit(self, budget: int) -> int:
        while self._waiting and budget > 0 and len(self._running) < self._max_running:
            request = self._waiting[0][2]
            if not self._allocate(request):
                break
            heapq.heappop(self._waiting)
            request.running = True
            self._running.append(request)
            request.chunk = min(request.pending, budget)
            budget -= request.chunk
        return budget

    def _allocate(self, request: Request) -> bool:
        """Hold the blocks of all its tokens and of the next one; reuse what is cached of its prompt."""
        hashes = block_hashes(request.prompt_ids, request.salt)
        private = math.ceil((request.total + 1) / BLOCK_TOKENS) - len(hashes)
        reused = self._kv.hold(hashes, private)
        if reused is None:
            return False
        request.blocks, request.private_blocks = hashes, private
        request.room = (len(hashes) + private) * BLOCK_TOKENS
        # The last token is always computed: its output is what is wanted.
        request.computed = min(reused * BLOCK_TOKENS, request.total - 1)
        if request.generated == 0:
            request.cached_tokens = request.computed
            self.prompt_tokens += len(request.prompt_ids)
            self.cached_tokens += request.computed
        return True

    def _grow(self, request: Request) -> None:
        """Hold one more block, at the cost of the newest request of lowest priority when all are held."""
        while self._kv.hold([], 1) is None:
            victim = max(self._running, key=lambda each: (each.priority, each.order))
            self.preemptions += 1
            self._stop(victim)
            heapq.heappush(self._waiting, (victim.priority, victim.order, victim))
            if victim is request:
                return
        request.private_blocks += 1
        request.room += BLOCK_TOKENS

    def _stop(self, request: Request) -> None:
        request.running = False
        self._running.remove(request)
        self._kv.release(request.blocks, request.private_blocks, computed=request.computed // BLOCK_TOKENS)
        request.blocks, request.private_blocks = [], 0
        request.computed = request.chunk = request.room = 0


def block_hashes(ids: Sequence[int], salt: str) -> list[int]:
    """Return a number for each full block of `ids`; equal only for equal ids up to there and equal salt."""
    chain = hash(salt)
    hashes = []
    for at in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        chain = hash((chain, *ids[at : at + BLOCK_TOKENS]))
        hashes.append(chain)
    return hashes


class _BlockPool:
    """KV blocks: private ones by count, prompt blocks by hash with a count of holders.

    A prompt block that nobody holds stays cached until its room is needed, the least recently used first.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._holders: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._ready: set[int] = set()
        """Held blocks whose KV is computed: only those can be reused by others."""
        self._private = 0

    @property
    def free(self) -> int:
        return self.total - self._private - len(self._holders)

    def hold(self, hashes: Sequence[int], private: int) -> int | None:
        """Hold these blocks; return how many leading ones need no computing, or None without room."""
        fresh = sum(1 for block in hashes if block not in self._holders)
        if fresh + private > self.free:
            return None
        reused, reusable = 0, True
        for block in hashes:
            reusable = reusable and (block in self._cached or block in self._ready)
            reused += reusable
            if block in self._cached:
                del self._cached[block]
                self._ready.add(block)
            self._holders[block] = self._holders.get(block, 0) + 1
        self._private += private
        while self._private + len(self._holders) + len(self._cached) > self.total:
            self._cached.popitem(last=False)
        return reused

    def release(self, hashes: Sequence[int], private: int, *, computed: int) -> None:
        """Let go of blocks; of the prompt's, the first `computed` are worth keeping."""
        self._private -= private
        for position, block in enumerate(hashes):
            if position < computed:
                self._ready.add(block)
            self._holders[block] -= 1
            if self._holders[block] == 0:
                del self._holders[block]
                if block in self._ready:
                    self._ready.discard(block)
                    self._cached[block] = None

    def forget(self) -> None:
        self._cached.clear()

    def mark_ready(self, held: Sequence[int]) -> None:
        self._ready.update(held)
