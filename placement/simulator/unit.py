"""One simulated unit: continuous batching with chunked prefill, paged KV, preemption by recompute, a prefix
cache.

Pure: `start` plans what runs next and says when it ends, `finish` carries it out. Between events the batch
does not change, so that all its steps up to the next one are one jump: its duration is a sum in closed form,
and an arrival cuts it at the step that is running. Bounded by the requests that a run has.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque

from placement.simulator.kv import BLOCK_TOKENS, PAGE_SLACK_TOKENS, KvMemory
from placement.simulator.steps import MAX_RUNNING, TOKEN_BUDGET, StepTimes

STEP_NOISE = 0.03
"""Standard deviation of one step's time."""

MAX_JUMP_STEPS = 1024
"""Attention is taken as linear over a jump; so many tokens more bend it little."""

PACE_MEMORY = 0.2
"""Weight of the newest jump in the step time that a unit reports."""


class Sequence:
    """A request on a unit."""

    __slots__ = (
        "blocks", "cached", "computed", "ends_at", "first_s", "generated", "held", "last_s", "output",
        "preempted", "private", "prompt", "request", "target",
    )  # fmt: skip

    def __init__(self, request: int, prompt: int, output: int, blocks: tuple[int, ...]) -> None:
        self.request = request
        self.prompt = prompt
        self.output = output
        self.blocks = blocks
        self.computed = 0
        """Prompt tokens whose KV is there."""
        self.target = prompt
        """Prompt tokens to compute; after a preemption the answer so far is among them."""
        self.generated = 0
        """As of the last time that the sequence entered or left the batch."""
        self.ends_at = 0
        """The unit's step count at its last token."""
        self.first_s = -1.0
        self.last_s = -1.0
        self.held: list[int] = []
        self.private = 0
        self.cached = 0
        self.preempted = 0


class Unit:
    __slots__ = (
        "_base_ms",
        "_chunks",
        "_duration_s",
        "_error",
        "_heap",
        "_rng",
        "_slope_ms",
        "_times",
        "blocked",
        "busy_s",
        "cached_tokens",
        "context_tokens",
        "decoding",
        "ends_s",
        "held",
        "jump",
        "kv",
        "kv_sum",
        "pace_ms",
        "preemptions",
        "prefilling",
        "prompt_tokens",
        "queued_tokens",
        "slots_s",
        "started_s",
        "steps",
        "version",
        "waiting",
    )

    def __init__(
        self, times: StepTimes, kv: KvMemory, context_tokens: int, error: float, rng: random.Random
    ) -> None:
        self._times = times
        self.kv = kv
        self.context_tokens = context_tokens
        self._error = error
        """Hidden: by what all of its steps are slower than the tables say."""
        self._rng = rng
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.decoding: dict[int, Sequence] = {}
        """By request, in the order in which they came in."""
        self._heap: list[tuple[int, int]] = []
        """(step count at its last token, request) of all that decode, and stale entries of the preempted."""
        self.held: dict[int, None] = {}
        self.kv_sum = 0
        """KV tokens of all that decode."""
        self.queued_tokens = 0
        """Prompt tokens admitted or waiting that are not computed yet."""
        self.steps = 0
        self.jump = 0
        """Steps of what runs now; 0 while idle."""
        self.version = 0
        """Rises with every plan, so that the end of an older plan is known for stale."""
        self.started_s = self.ends_s = 0.0
        self._duration_s = 0.0
        self._base_ms = self._slope_ms = 0.0
        self._chunks: list[tuple[Sequence, int]] = []
        self.blocked = False
        """Whoever waits can't come in before a sequence ends."""
        self.busy_s = self.slots_s = 0.0
        self.pace_ms = -1.0
        self.prompt_tokens = self.cached_tokens = self.preemptions = 0

    # --- what comes -------------------------------------------------------------------------

    def land(self, sequence: Sequence, now_s: float) -> bool:
        """Take a request in; return whether a plan is needed or changed: `ends_s` is then another."""
        self.waiting.append(sequence)
        self.held[sequence.request] = None
        self.queued_tokens += sequence.target
        if self.jump == 0:
            return self.start(now_s)
        if self.blocked or self.jump == 1 or len(self.waiting) > 1:
            return False
        return self._cut(now_s)

    def _cut(self, now_s: float) -> bool:
        """End the jump with the step that runs at `now_s`."""
        steps = min(self.done_steps(now_s) + 1, self.jump)
        if steps == self.jump:
            return False
        self.ends_s = self.started_s + self._duration_s * self._sum_ms(steps) / self._sum_ms(self.jump)
        self._duration_s = self.ends_s - self.started_s
        self.jump = steps
        self.version += 1
        return True

    def _sum_ms(self, steps: int) -> float:
        return steps * self._base_ms + self._slope_ms * steps * (steps - 1) / 2

    def done_steps(self, now_s: float) -> int:
        """Return how many steps of the jump are over at `now_s`."""
        if self.jump <= 1:
            return 0
        part_ms = self._sum_ms(self.jump) * (now_s - self.started_s) / self._duration_s
        half = self._base_ms - self._slope_ms / 2
        if self._slope_ms > 1e-12:
            steps = (math.sqrt(half * half + 2 * self._slope_ms * part_ms) - half) / self._slope_ms
        else:
            steps = part_ms / self._base_ms
        return min(max(int(steps), 0), self.jump - 1)

    # --- planning ---------------------------------------------------------------------------

    def start(self, now_s: float) -> bool:
        """Plan what runs next; return whether there is anything."""
        self.version += 1
        self._admit()
        batch = len(self.decoding)
        if not batch and not self.prefilling:
            self.jump = 0
            return False
        total_ms = self._plan_chunks(batch) if self.prefilling else self._plan_jump(batch)
        noise = 1.0 + STEP_NOISE * self._rng.gauss(0.0, 1.0) / math.sqrt(self.jump)
        self.started_s = now_s
        self._duration_s = total_ms * self._error * max(noise, 0.5) / 1e3
        self.ends_s = now_s + self._duration_s
        return True

    def _admit(self) -> None:
        """Let those in who wait, first come first served, while slots, the step's tokens and KV allow."""
        if self.blocked:
            return
        kv = self.kv
        pending = sum(s.target - s.computed for s in self.prefilling)
        while self.waiting:
            if pending >= TOKEN_BUDGET - len(self.decoding):
                return
            if len(self.decoding) + len(self.prefilling) >= MAX_RUNNING:
                self.blocked = True
                return
            sequence = self.waiting[0]
            matched = kv.matched(sequence.blocks)
            # The last token is computed anew, or there would be nothing to give the first one.
            cached = min(matched * BLOCK_TOKENS, sequence.prompt - 1)
            shared = sequence.blocks[:matched]
            need = (
                sequence.target - matched * BLOCK_TOKENS if matched * BLOCK_TOKENS <= sequence.target else 0
            )
            need += PAGE_SLACK_TOKENS
            if kv.free - BLOCK_TOKENS * kv.idle_among(shared) < need + 1:
                # An empty unit always has room: longer requests than its memory holds never land here.
                self.blocked = True
                return
            self.waiting.popleft()
            kv.hold(shared)
            kv.take(need)
            sequence.held = list(shared)
            sequence.private = need
            sequence.computed = cached
            if not sequence.preempted:
                sequence.cached = cached
                self.prompt_tokens += sequence.prompt
                self.cached_tokens += cached
            self.queued_tokens -= cached
            self.prefilling.append(sequence)
            pending += sequence.target - cached

    def _plan_chunks(self, batch: int) -> float:
        left = max(TOKEN_BUDGET - batch, 1)
        chunks, first = [], 0
        self._chunks = []
        for sequence in self.prefilling:
            take = min(sequence.target - sequence.computed, left)
            end = sequence.computed + take
            chunks.append((sequence.computed, end))
            self._chunks.append((sequence, end))
            first += end == sequence.target
            left -= take
            if left <= 0:
                break
        if batch and self.kv.free < batch:
            batch = self._preempt_for(batch)
        self.jump = 1
        self._base_ms, self._slope_ms = self._times.mixed_ms(batch, self.kv_sum, chunks, first), 0.0
        return self._base_ms

    def _plan_jump(self, batch: int) -> float:
        kv = self.kv
        if kv.free < batch:
            batch = self._preempt_for(batch)
        heap = self._heap
        while self._is_stale(heap[0]):
            heapq.heappop(heap)
        steps = min(heap[0][0] - self.steps, MAX_JUMP_STEPS, max(kv.free // batch, 1))
        self.jump = steps
        first_ms = self._times.decode_ms(batch, self.kv_sum)
        self._base_ms, self._slope_ms = first_ms, 0.0
        if steps > 1:
            last_ms = self._times.decode_ms(batch, self.kv_sum + batch * (steps - 1))
            self._slope_ms = max(0.0, (last_ms - first_ms) / (steps - 1))
        return self._sum_ms(steps)

    def _is_stale(self, entry: tuple[int, int]) -> bool:
        sequence = self.decoding.get(entry[1])
        return sequence is None or sequence.ends_at != entry[0]

    def _preempt_for(self, batch: int) -> int:
        """Send the youngest of the batch back to wait until one step has room; return the batch that is
        left."""
        while batch > 1 and self.kv.free < batch:
            request = next(reversed(self.decoding))
            sequence = self.decoding.pop(request)
            batch -= 1
            generated = sequence.output - (sequence.ends_at - self.steps)
            self.kv.give_back(generated - sequence.generated)
            sequence.generated = generated
            self.kv_sum -= sequence.prompt + sequence.generated
            sequence.target = sequence.prompt + sequence.generated
            sequence.computed = 0
            sequence.preempted += 1
            self.preemptions += 1
            self._forget(sequence)
            self.queued_tokens += sequence.target
            self.waiting.appendleft(sequence)
            self.blocked = True
        return batch

    def _forget(self, sequence: Sequence) -> None:
        self.kv.release(sequence.held)
        self.kv.give_back(sequence.private)
        sequence.held, sequence.private = [], 0

    # --- carrying out -----------------------------------------------------------------------

    def finish(self, now_s: float) -> tuple[list[Sequence], list[Sequence]]:
        """Carry out what was planned; return who got a first token and who has ended."""
        steps, batch, kv = self.jump, len(self.decoding), self.kv
        self.steps += steps
        self.busy_s += self._duration_s
        self.slots_s += self._duration_s * (batch + len(self._chunks))
        first: list[Sequence] = []
        ended: list[Sequence] = []
        if batch:
            grown = batch * steps
            self.kv_sum += grown
            kv.take(grown)
            heap = self._heap
            while heap and heap[0][0] <= self.steps:
                entry = heapq.heappop(heap)
                if self._is_stale(entry):
                    continue
                sequence = self.decoding.pop(entry[1])
                self.kv_sum -= sequence.prompt + sequence.output
                # What it grew by while it decoded was taken for the batch as a whole.
                kv.give_back(sequence.output - sequence.generated)
                self._end(sequence, now_s)
                ended.append(sequence)
        if self._chunks:
            self._compute(now_s, first, ended)
        else:
            step_ms = 1e3 * self._duration_s / steps
            self.pace_ms = (
                step_ms if self.pace_ms < 0 else self.pace_ms + PACE_MEMORY * (step_ms - self.pace_ms)
            )
        self.jump = 0
        return first, ended

    def _compute(self, now_s: float, first: list[Sequence], ended: list[Sequence]) -> None:
        done = 0
        for sequence, end in self._chunks:
            self.queued_tokens -= end - sequence.computed
            sequence.computed = end
            if end < sequence.target:
                continue
            done += 1
            fresh = sequence.blocks[len(sequence.held) :]
            if fresh and sequence.target >= BLOCK_TOKENS * len(sequence.blocks):
                shared = self.kv.share(fresh)
            else:
                # The last id of a prompt that does not fill it names a block that can't be shared.
                shared = self.kv.share(fresh[:-1])
            sequence.held += shared
            sequence.private -= BLOCK_TOKENS * len(shared)
            sequence.generated += 1
            if sequence.first_s < 0:
                sequence.first_s = now_s
                first.append(sequence)
            if sequence.generated >= sequence.output:
                self._end(sequence, now_s)
                ended.append(sequence)
                continue
            self.kv.take(1)
            sequence.private += 1
            sequence.ends_at = self.steps + sequence.output - sequence.generated
            self.decoding[sequence.request] = sequence
            self.kv_sum += sequence.prompt + sequence.generated
            heapq.heappush(self._heap, (sequence.ends_at, sequence.request))
        # Chunks are given in order, so those at their end are the first ones.
        del self.prefilling[:done]
        self._chunks = []

    def _end(self, sequence: Sequence, now_s: float) -> None:
        sequence.last_s = now_s
        self._forget(sequence)
        del self.held[sequence.request]
        self.blocked = False
