"""All admission and all stream accounting of one unit live here; nothing here awaits, reads a clock or sends.

`Unit.handle(event, now_s)` returns effects; `server.py` carries them out and feeds back what happened.

    submit ──▶ PREPARING ──▶ (accepted) ──▶ WAITING ──▶ RUNNING ──▶ done | failed
                   │                            │           │
                refused                       failed     CLOSING ──▶ slot free

Invariants: a submit is answered by one Refused, or by one Accepted and then exactly one Done or Failed;
at most `max_running` jobs are in the engine (CLOSING ones included: their slot is not free yet) and at
most `max_waiting` beyond them; nobody waits while a slot is free; indices of tokens are contiguous.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grid.engines.base import EngineLoad
from grid.errors import (
    Cancelled,
    Conflict,
    DeadlineExceeded,
    GridError,
    InternalError,
    InvalidRequest,
    Overloaded,
    Rejected,
    UnitLost,
)
from grid.units import events as ev
from grid.units.job import (
    AttemptKey,
    Job,
    Phase,
    accepted_frame,
    attempt_key,
    done_frame,
    failed_frame,
    generation,
    times_of,
)
from grid.units.pace import Pace
from grid.wire.messages import Embed, Progress, Refused, Submit, Vectors
from grid.words import FinishReason, Task, UnitCard, UnitLoad, UnitState

MAX_EMBED_TEXTS = 256
"""Texts in one Embed: about 3 s of one slot on CPU cores; the gateway sends batches."""

ATTEMPTS_REMEMBERED = 4096
"""Ended attempts kept to refuse a replayed submit: minutes of traffic at a unit's usual rate, under 1 MB."""

MIN_RETRY_AFTER_S = 0.05
MAX_RETRY_AFTER_S = 60.0
"""A caller told to stay away for longer would miss slots that open sooner than predicted."""

CLOSING_TICKS = 600
"""Ticks until an engine that does not give an aborted slot back counts as dead: 30 s at the server's 50 ms.
Ticks, not wall time, so that a process that was stopped for a while does not blame its engine."""

PROGRESS_S = 0.25
"""After so long without a token a stream says that its engine still steps: well within the second after which
a gateway calls an engine stuck."""

ABLE = (UnitState.READY, UnitState.STANDBY, UnitState.ASLEEP)
"""States in which work is taken. Who is on standby gets none, unless placement takes it in."""

STALE_ENTRIES = 256
"""Entries of ended jobs that a heap may hold beyond twice the live ones before it is swept."""


@dataclass(slots=True)
class Counters:
    """What the unit has seen since it started."""

    accepted: int = 0
    refused: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    """Asked by the caller, or its connection was lost."""
    output_tokens: int = 0
    first_tokens: int = 0
    first_token_s: float = 0.0
    """From admission to the first token, over all that had one."""
    embedded_texts: int = 0
    late_events: int = 0
    """Answers of the engine for jobs that had ended: normal after a cancel."""
    cancel_to_free_ms: float = 0.0
    """Of the last running stream that was ended early: from the cancel (or lost peer, or deadline) until the
    engine had given its slot back."""
    cancel_to_free_ms_max: float = 0.0


class Unit:
    """The state of one unit. `card` says its caps, its cost factor and what it runs."""

    def __init__(self, card: UnitCard) -> None:
        self.card = card
        self.state = UnitState.READY
        self.counters = Counters()
        self._jobs: dict[int, Job] = {}
        self._by_stream: dict[tuple[int, int], Job] = {}
        self._phases = dict.fromkeys(Phase, 0)
        self._queue: list[tuple[int, int]] = []
        self._deadlines: list[tuple[float, int]] = []
        self._closing_since_s: dict[int, float] = {}
        self._closing_ticks: dict[int, int] = {}
        self._attempts: set[AttemptKey] = set()
        self._ended_attempts: deque[AttemptKey] = deque()
        self._last_number = 0
        self._pace = Pace(card.decode_ms_per_token)
        self._share_s = 0.0
        self._share_read_s = 0.0
        self._steps = 0
        self._stepped_s = -math.inf
        """When the engine's step counter was last seen to advance."""
        self._handlers: dict[type, Callable[[Any, float], list[ev.Effect]]] = {
            ev.Submitted: self._submitted,
            ev.EmbedAsked: self._embed_asked,
            ev.CancelAsked: self._cancel_asked,
            ev.PeerLost: self._peer_lost,
            ev.PromptReady: self._prompt_ready,
            ev.Stepped: self._stepped,
            ev.Encoded: self._encoded,
            ev.Broke: self._broke,
            ev.Released: self._released,
            ev.EngineDied: self._engine_died,
            ev.SetDraining: self._set_draining,
            ev.SetState: self._set_state,
            ev.Tick: self._tick,
        }

    def handle(self, event: ev.Event, now_s: float) -> list[ev.Effect]:
        """Take one event at `now_s` (monotonic seconds) and return what is to be done, in order."""
        return self._handlers[type(event)](event, now_s)

    # --- what others read -------------------------------------------------------------------

    @property
    def in_engine(self) -> int:
        """Slots that are not free."""
        return self._phases[Phase.RUNNING] + self._phases[Phase.CLOSING]

    @property
    def is_idle(self) -> bool:
        """No stream is open and every slot is free."""
        return not self._jobs

    def load(self, engine: EngineLoad) -> UnitLoad:
        """Return the unit's sample. A prompt in preparation counts where it will stand: it has its place."""
        running = min(len(self._jobs), self.card.max_running)
        queued = sum(
            len(job.prompt.prompt_ids)
            for job in self._jobs.values()
            if job.phase is Phase.WAITING and job.prompt is not None
        )
        return UnitLoad(
            unit_id=self.card.unit_id,
            incarnation=self.card.incarnation,
            state=int(self.state),
            running=running,
            waiting=len(self._jobs) - running,
            kv_tokens_free=engine.kv_tokens_free,
            kv_tokens_total=engine.kv_tokens_total,
            prefill_tokens_queued=engine.prefill_tokens_queued + queued,
            steps=engine.steps,
            reservations=tuple(
                job.request.reservation_id for job in self._by_stream.values() if job.request.reservation_id
            ),
            prefill_tokens_per_s=engine.prefill_tokens_per_s,
            decode_ms_per_token=engine.decode_ms_per_token,
            prompt_tokens=engine.prompt_tokens,
            cached_tokens=engine.cached_tokens,
            admits=engine.admits,
            chunk_tokens=engine.chunk_tokens,
            preemptions=engine.preemptions,
        )

    def retry_after_s(self, now_s: float) -> float:
        """Return when the next slot is expected to free, from the measured pace of what runs."""
        expected_s = min(
            (
                self._pace.remaining_s(job.produced, job.budget, now_s - job.started_s)
                for job in self._jobs.values()
                if job.phase is Phase.RUNNING
            ),
            default=0.0,
        )
        return min(max(expected_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)

    # --- events from peers ------------------------------------------------------------------

    def _submitted(self, event: ev.Submitted, now_s: float) -> list[ev.Effect]:
        submit = event.submit
        refusal = self._refusal(event.peer, submit, Task.GENERATE, now_s)
        if refusal is not None:
            return [refusal]
        emitted, budget = len(submit.emitted_ids), submit.sampling.max_output_tokens
        if budget < (0 if emitted else 1):
            wrong = InvalidRequest(
                f"max_output_tokens is {budget}; at least 1 is needed", param="max_output_tokens"
            )
            return [self._refuse(event.peer, submit.stream, wrong)]
        job = self._admit(event.peer, submit, now_s)
        self._attempts.add(attempt_key(submit))
        # The prompt of a continuation must come out as its first attempt's did, so room is kept for the
        # whole answer: what was emitted and the rest of the budget.
        return [ev.Prepare(job.number, submit.messages, submit.documents, emitted + budget)]

    def _embed_asked(self, event: ev.EmbedAsked, now_s: float) -> list[ev.Effect]:
        embed = event.embed
        refusal = self._refusal(event.peer, embed, Task.EMBED, now_s)
        if refusal is not None:
            return [refusal]
        if not 1 <= len(embed.texts) <= MAX_EMBED_TEXTS:
            wrong = InvalidRequest(
                f"{len(embed.texts)} texts in one call; between 1 and {MAX_EMBED_TEXTS} are taken",
                param="texts",
            )
            return [self._refuse(event.peer, embed.stream, wrong)]
        return self._enqueue(self._admit(event.peer, embed, now_s), now_s)

    def _cancel_asked(self, event: ev.CancelAsked, now_s: float) -> list[ev.Effect]:
        job = self._by_stream.get((event.peer, event.stream))
        if job is None:
            return []  # it ended while the cancel was on its way
        self.counters.cancelled += 1
        return self._fail(job, Cancelled("the caller cancelled the stream"), now_s)

    def _peer_lost(self, event: ev.PeerLost, now_s: float) -> list[ev.Effect]:
        effects: list[ev.Effect] = []
        for job in [job for job in self._by_stream.values() if job.peer == event.peer]:
            self.counters.cancelled += 1
            effects += self._end(job, now_s, error_code=Cancelled.code)
        return effects

    # --- events from the engine -------------------------------------------------------------

    def _prompt_ready(self, event: ev.PromptReady, now_s: float) -> list[ev.Effect]:
        job = self._jobs.get(event.job)
        if job is None:
            self.counters.late_events += 1
            return []
        submit = job.request
        assert isinstance(submit, Submit)
        assert job.phase is Phase.PREPARING
        if submit.prompt_hash and submit.prompt_hash != event.prepared.prompt_hash:
            differs = Conflict("the prompt of this continuation differs from that of its first attempt")
            return self._fail(job, differs, now_s)
        job.prompt = event.prepared
        job.accepted_s = job.said_s = now_s
        self.counters.accepted += 1
        accepted = ev.Send(job.peer, accepted_frame(job, self.card.fingerprint))
        if job.budget == 0:
            return [accepted, *self._done(job, FinishReason.LENGTH, now_s, engine_finished=True)]
        return [accepted, *self._enqueue(job, now_s)]

    def _stepped(self, event: ev.Stepped, now_s: float) -> list[ev.Effect]:
        job, step = self._jobs.get(event.job), event.step
        if job is None or job.phase is not Phase.RUNNING:
            self.counters.late_events += 1
            return []
        budget = job.budget
        if job.produced + len(step.ids) > budget:
            broken = InternalError(f"the engine passed the budget of {budget} output tokens")
            return self._fail(job, broken, now_s)
        if job.first_step_s == math.inf and step.ids:
            self.counters.first_tokens += 1
            self.counters.first_token_s += now_s - job.accepted_s
        tokens = job.take(step, now_s)
        self.counters.output_tokens += len(step.ids)
        effects: list[ev.Effect] = [] if tokens is None else [ev.Send(job.peer, tokens)]
        if step.finish_reason is not None:
            effects += self._done(job, step.finish_reason, now_s, engine_finished=True)
        elif job.produced == budget:
            effects += self._done(job, FinishReason.LENGTH, now_s)
        return effects

    def _encoded(self, event: ev.Encoded, now_s: float) -> list[ev.Effect]:
        job = self._jobs.get(event.job)
        if job is None or job.phase is not Phase.RUNNING:
            self.counters.late_events += 1
            return []
        embed = job.request
        assert isinstance(embed, Embed)
        self.counters.done += 1
        self.counters.embedded_texts += len(embed.texts)
        self._pace.ended(1, now_s - job.started_s)
        cu_seconds = (self._advance_share(now_s) - job.share_mark_s) * self.card.cu_factor
        vectors = Vectors(embed.stream, event.dimension, event.data, event.input_tokens, cu_seconds)
        return [ev.Send(job.peer, vectors), *self._end(job, now_s, engine_finished=True)]

    def _broke(self, event: ev.Broke, now_s: float) -> list[ev.Effect]:
        if isinstance(event.error, UnitLost):
            return self._engine_died(ev.EngineDied(event.error.message), now_s)
        job = self._jobs.get(event.job)
        if job is None or job.phase is Phase.CLOSING:
            self.counters.late_events += 1
            return []
        return self._fail(job, event.error, now_s, engine_finished=True)

    def _released(self, event: ev.Released, now_s: float) -> list[ev.Effect]:
        job = self._jobs.get(event.job)
        if job is None:
            return []
        if job.phase is Phase.RUNNING:
            broken = InternalError("the engine ended the stream without a finish reason")
            return self._fail(job, broken, now_s, engine_finished=True)
        assert job.phase is Phase.CLOSING
        elapsed_ms = (now_s - self._closing_since_s.pop(job.number)) * 1000
        del self._closing_ticks[job.number]
        self.counters.cancel_to_free_ms = elapsed_ms
        self.counters.cancel_to_free_ms_max = max(self.counters.cancel_to_free_ms_max, elapsed_ms)
        self._free(job, now_s)
        return self._start_waiting(now_s)

    def _engine_died(self, event: ev.EngineDied, now_s: float) -> list[ev.Effect]:
        if self.state is UnitState.FAILED:
            return []
        self.state = UnitState.FAILED
        lost = UnitLost(f"the engine of {self.card.unit_id} died: {event.reason}")
        effects: list[ev.Effect] = []
        for job in list(self._by_stream.values()):
            effects += self._fail(job, lost, now_s)
        return [*effects, ev.Died(event.reason)]

    # --- events from the owner --------------------------------------------------------------

    def _set_draining(self, event: ev.SetDraining, now_s: float) -> list[ev.Effect]:
        if self.state is not UnitState.FAILED:
            self.state = UnitState.DRAINING if event.draining else UnitState.READY
        return []

    def _set_state(self, event: ev.SetState, now_s: float) -> list[ev.Effect]:
        if self.state in ABLE:
            self.state = event.state
        return []

    def _tick(self, event: ev.Tick, now_s: float) -> list[ev.Effect]:
        effects = self._progress(event.steps, now_s)
        while self._deadlines and self._deadlines[0][0] <= now_s:
            job = self._jobs.get(heapq.heappop(self._deadlines)[1])
            if job is not None and job.phase is not Phase.CLOSING:
                effects += self._fail(job, DeadlineExceeded("the request's deadline passed"), now_s)
        for number in self._closing_ticks:
            self._closing_ticks[number] += 1
        if any(ticks > CLOSING_TICKS for ticks in self._closing_ticks.values()):
            effects += self._engine_died(ev.EngineDied("it does not give back an aborted slot"), now_s)
        return effects

    def _progress(self, steps: int, now_s: float) -> list[ev.Effect]:
        """Tell quiet streams that the engine is slow, not stuck: it has stepped since they spoke."""
        if steps != self._steps:
            self._steps, self._stepped_s = steps, now_s
        effects: list[ev.Effect] = []
        for job in self._by_stream.values():
            submit = job.request
            is_quiet = now_s >= job.said_s + PROGRESS_S and self._stepped_s > job.said_s
            if is_quiet and isinstance(submit, Submit) and job.phase in (Phase.WAITING, Phase.RUNNING):
                job.said_s = now_s
                effects.append(ev.Send(job.peer, Progress(submit.stream, submit.attempt, job.doing)))
        return effects

    # --- admission --------------------------------------------------------------------------

    def _refusal(self, peer: int, request: Submit | Embed, task: Task, now_s: float) -> ev.Effect | None:
        """Return the answer to a request that can't be taken, or None."""
        if (peer, request.stream) in self._by_stream:
            return ev.Drop(peer, InvalidRequest.code, f"stream {request.stream} is already in use")
        error: GridError | None = None
        if self.state not in ABLE:
            error = Rejected(f"unit {self.card.unit_id} is {self.state.name.lower()}; ask another one")
        elif self.card.task != task or self.card.model != request.model:
            error = InvalidRequest(
                f"unit {self.card.unit_id} runs {self.card.model} ({Task(self.card.task).name.lower()}), "
                f"not {request.model} ({task.name.lower()})",
                param="model",
            )
        elif isinstance(request, Submit) and attempt_key(request) in self._attempts:
            error = Conflict(f"attempt {request.attempt} of {request.request_id} was already submitted")
        elif request.deadline_ms < 0:
            error = DeadlineExceeded("the request's deadline had passed when it arrived")
        elif len(self._jobs) >= self.card.max_running + self.card.max_waiting:
            error = Overloaded(
                f"unit {self.card.unit_id} is full "
                f"({self.card.max_running} running, {self.card.max_waiting} waiting)",
                retry_after_s=self.retry_after_s(now_s),
            )
        return None if error is None else self._refuse(peer, request.stream, error)

    def _admit(self, peer: int, request: Submit | Embed, now_s: float) -> Job:
        if self.state is not UnitState.READY:
            self.state = UnitState.READY  # placement has taken it in: its word may be slower than its work
        self._last_number += 1
        job = Job(self._last_number, peer, request, arrived_s=now_s, accepted_s=now_s)
        self._jobs[job.number] = job
        self._by_stream[peer, request.stream] = job
        self._phases[Phase.PREPARING] += 1
        if request.deadline_ms:
            job.deadline_s = now_s + request.deadline_ms / 1000
            heapq.heappush(self._deadlines, (job.deadline_s, job.number))
            self._sweep(self._deadlines)
        return job

    def _refuse(self, peer: int, stream: int, error: GridError) -> ev.Effect:
        self.counters.refused += 1
        return ev.Send(peer, Refused.of(stream, error))

    # --- slots ------------------------------------------------------------------------------

    def _enqueue(self, job: Job, now_s: float) -> list[ev.Effect]:
        if self.in_engine < self.card.max_running:
            return [self._start(job, now_s)]
        self._move(job, Phase.WAITING)
        submit = job.request if isinstance(job.request, Submit) else None
        # A lower priority number runs first, as in vLLM; equal ones in order of arrival.
        heapq.heappush(self._queue, (submit.priority if submit else 0, job.number))
        self._sweep(self._queue)
        return [ev.Send(job.peer, Progress(submit.stream, submit.attempt, "waiting"))] if submit else []

    def _start(self, job: Job, now_s: float) -> ev.Effect:
        job.share_mark_s = self._advance_share(now_s)
        job.started_s = now_s
        self._move(job, Phase.RUNNING)
        if isinstance(job.request, Embed):
            return ev.Encode(job.number, job.request.texts)
        return ev.Generate(job.number, generation(job))

    def _start_waiting(self, now_s: float) -> list[ev.Effect]:
        effects: list[ev.Effect] = []
        while self._queue and self.in_engine < self.card.max_running and self.state is not UnitState.FAILED:
            job = self._jobs.get(heapq.heappop(self._queue)[1])
            if job is not None:
                effects.append(self._start(job, now_s))
        return effects

    def _move(self, job: Job, phase: Phase) -> None:
        self._phases[job.phase] -= 1
        self._phases[phase] += 1
        job.phase = phase

    def _advance_share(self, now_s: float) -> float:
        """Return the clock of shared encode time: with n requests in the engine it runs at 1/n."""
        self._share_s += (now_s - self._share_read_s) / max(self._phases[Phase.RUNNING], 1)
        self._share_read_s = now_s
        return self._share_s

    def _sweep(self, heap: list[Any]) -> None:
        """Drop entries of ended jobs once they outnumber the live ones."""
        if len(heap) > 2 * len(self._jobs) + STALE_ENTRIES:
            heap[:] = [entry for entry in heap if entry[1] in self._jobs]
            heapq.heapify(heap)

    # --- ends -------------------------------------------------------------------------------

    def _done(self, job: Job, reason: str, now_s: float, *, engine_finished: bool = False) -> list[ev.Effect]:
        self.counters.done += 1
        if job.started_s < math.inf:
            self._pace.ended(job.produced, now_s - job.started_s)
        done = ev.Send(job.peer, done_frame(job, reason, self.card.cu_factor, now_s))
        return [done, *self._end(job, now_s, engine_finished=engine_finished)]

    def _fail(
        self, job: Job, error: GridError, now_s: float, *, engine_finished: bool = False
    ) -> list[ev.Effect]:
        """End a stream with an error: Refused before it was accepted, Failed after."""
        if job.prompt is None:
            end = self._refuse(job.peer, job.request.stream, error)
        else:
            self.counters.failed += 1
            end = ev.Send(job.peer, failed_frame(job, error, self.card.cu_factor))
        ending = self._end(job, now_s, engine_finished=engine_finished, error_code=error.code)
        return [end, *ending]

    def _end(
        self, job: Job, now_s: float, *, engine_finished: bool = False, error_code: str = ""
    ) -> list[ev.Effect]:
        """Forget the stream; its slot is free now if the engine is done with it, else when it says so."""
        freeing = self._let_go(job, now_s, engine_finished)
        return [ev.Traced(times_of(job, now_s), error_code), *freeing] if job.request.traceparent else freeing

    def _let_go(self, job: Job, now_s: float, engine_finished: bool) -> list[ev.Effect]:
        del self._by_stream[job.peer, job.request.stream]
        self._forget_attempt(job)
        phase = job.phase
        if phase is Phase.RUNNING and not engine_finished and self.state is not UnitState.FAILED:
            self._advance_share(now_s)
            self._move(job, Phase.CLOSING)
            self._closing_since_s[job.number] = now_s
            self._closing_ticks[job.number] = 0
            return [ev.Abort(job.number)]
        self._free(job, now_s)
        in_hand = phase is not Phase.WAITING and not engine_finished
        return [*([ev.Abort(job.number)] if in_hand else []), *self._start_waiting(now_s)]

    def _free(self, job: Job, now_s: float) -> None:
        self._advance_share(now_s)
        self._phases[job.phase] -= 1
        del self._jobs[job.number]

    def _forget_attempt(self, job: Job) -> None:
        """An attempt that was never accepted may come again; the others are remembered for a while."""
        key = job.attempt_key
        if key is None:
            return
        if job.prompt is None:
            self._attempts.discard(key)
            return
        self._ended_attempts.append(key)
        if len(self._ended_attempts) > ATTEMPTS_REMEMBERED:
            self._attempts.discard(self._ended_attempts.popleft())
