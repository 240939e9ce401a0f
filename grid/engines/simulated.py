"""The simulated engine: `Batch` carried out in real time, one loop task for all requests of the unit.

Deterministic: the answer to a prompt depends on the configured seed, the prompt's hash and, for sampled
requests, their seed. It is always marked as simulated (`EngineFacts.simulated`, and the answer's own text).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

from grid.config import Model
from grid.engines import simulated_text as text
from grid.engines import variants
from grid.engines.base import EngineFacts, EngineLoad, Generation, Prepared, Sink, Step, check_emitted
from grid.engines.batching import BLOCK_TOKENS, Batch, Request, Speed
from grid.engines.meter import follow
from grid.engines.packing import (
    arranged,
    check_room,
    document_block,
    fitting,
    heading_block,
    prompt_hash,
    split_system,
)
from grid.errors import GridError, InternalError, UnitLost
from grid.hardware import catalogue
from grid.words import UNKNOWN, FinishReason, Message, Precision

GPU_MEMORY_SHARE = 0.9
"""What an engine takes of its memory grant; the rest is for activations and the driver."""

PCIE_MB_PER_S = 25_000.0
"""From the host's memory to a GPU, over sixteen lanes of the fourth generation, as copies reach it."""

MAX_CATCH_UP_S = 0.25
"""A loop that was held up makes up for so much lost time and forgets the rest, as an engine in a process
of its own would not have been held up, but a burst of seconds would be no engine's behaviour either."""


class SimulatedEngine:
    """Implements `grid.engines.base.Engine`."""

    def __init__(self, model: Model) -> None:
        precision, settings = Precision.parse(model.precision), model.simulated
        gpu, parameters_b = variants.pretended_gpu(model), variants.parameters_b(model)
        self._model = model
        self._seed = settings.seed
        self._answer_tokens = settings.answer_tokens
        self._full_speed = settings.full_speed
        self._fail_every = settings.fail_every
        weights_mb = catalogue.weights_mb(parameters_b, precision)
        self._wake_s = 0.0 if settings.full_speed else weights_mb / PCIE_MB_PER_S / settings.speed
        self._generations = 0
        prefill = catalogue.prefill_tokens_per_s(gpu.name, parameters_b, precision, model.gpus)
        decode_ms = catalogue.decode_ms_per_token(gpu.name, parameters_b, precision, model.gpus)
        bandwidth = gpu.bandwidth_gb_per_s * 1e9 * catalogue.BANDWIDTH_EFFICIENCY * (model.gpus or 1.0)
        speed = Speed(
            prefill_tokens_per_s=prefill * settings.speed,
            weights_read_s=(decode_ms - catalogue.STEP_OVERHEAD_MS) / 1e3 / settings.speed,
            kv_read_s_per_token=catalogue.kv_bytes_per_token(parameters_b) / bandwidth / settings.speed,
            overhead_s=catalogue.STEP_OVERHEAD_MS / 1e3 / settings.speed,
        )
        self._batch = Batch(speed, max_running=model.max_running, kv_tokens=kv_tokens(model))
        self._facts = EngineFacts(
            model=model.name,
            precision=precision,
            fingerprint=f"simulated/{model.name}/{precision.label}/seed{settings.seed}",
            context_tokens=model.context_tokens,
            simulated=True,
            kv_tokens_total=self._batch.kv_tokens_total,
            prefill_tokens_per_s=speed.prefill_tokens_per_s,
            decode_ms_per_token=decode_ms / settings.speed,
        )
        self._prefill_tokens_per_s = self._decode_ms = UNKNOWN
        self._answers: dict[Request, _Answer] = {}
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._lost: UnitLost | None = None

    async def start(self) -> EngineFacts:
        self._task = asyncio.create_task(self._run(), name=f"simulated-{self._model.name}")
        return self._facts

    async def prepare(
        self, messages: Sequence[Message], documents: Sequence[str], max_output_tokens: int
    ) -> Prepared:
        context = self._model.context_tokens
        # A giant prompt is refused by a proven lower bound, without the time to tokenise it.
        at_least = sum(len(message.text) for message in messages) // text.LONGEST_TOKEN_CHARACTERS
        check_room(at_least, max_output_tokens, context, exact=False)
        ids = text.render(messages)
        room = check_room(len(ids), max_output_tokens, context)
        system, _ = split_system(messages)
        heading, blocks = text.encode(heading_block(system)), []

        def sizes() -> Iterator[int]:
            for document in documents:
                blocks.append(text.encode(document_block(document)))
                yield len(blocks[-1])

        used = fitting(sizes(), room - len(heading))
        if used:
            ids = text.with_context(ids, arranged(heading, blocks[:used]))
        prompt_ids = tuple(ids)
        return Prepared(prompt_ids, prompt_hash(prompt_ids), used)

    def generate(self, generation: Generation, sink: Sink) -> _Answer:
        if self._lost is not None:
            raise self._lost
        sampling, prompt, emitted = generation.sampling, generation.prompt, generation.emitted_ids
        check_emitted(text.decode(emitted), generation.emitted_code_points)
        tokens = len(prompt.prompt_ids) + len(emitted)
        check_room(tokens, sampling.max_output_tokens, self._model.context_tokens)
        seed = None if sampling.temperature == 0 else sampling.seed or 0
        key = text.answer_key(self._seed, prompt.prompt_hash, seed)
        allowed, reason = sampling.max_output_tokens, FinishReason.LENGTH
        if self._answer_tokens:
            natural = max(0, text.answer_tokens(key, self._answer_tokens) - len(emitted))
            if natural <= allowed:
                allowed, reason = natural, FinishReason.STOP
        request = Request(
            prompt_ids=(*prompt.prompt_ids, *emitted),
            salt=generation.tenant_salt,
            max_new_tokens=allowed,
            priority=generation.priority,
        )
        answer = self._answers[request] = _Answer(
            self,
            request,
            sink,
            key=key,
            index=len(emitted),
            end_reason=reason,
            breaks_after=self._breaks_after(allowed),
        )
        if allowed == 0:
            asyncio.get_running_loop().call_soon(answer.end_at_once)
        else:
            self._batch.add(request)
            self._work.set()
        return answer

    def _breaks_after(self, allowed: int) -> int:
        """Return the number of tokens at which the next generation breaks, 0 for one that doesn't."""
        self._generations += 1
        fails = self._fail_every and self._generations % self._fail_every == 0
        return -(-allowed // 2) if fails else 0

    def load(self) -> EngineLoad:
        batch = self._batch
        return EngineLoad(
            running=batch.running,
            waiting=batch.waiting,
            kv_tokens_free=batch.kv_tokens_free,
            kv_tokens_total=batch.kv_tokens_total,
            prefill_tokens_queued=batch.prefill_tokens_queued,
            steps=batch.steps,
            prefill_tokens_per_s=self._prefill_tokens_per_s,
            decode_ms_per_token=self._decode_ms,
            prompt_tokens=batch.prompt_tokens,
            cached_tokens=batch.cached_tokens,
        )

    async def check(self) -> None:
        if self._lost is not None:
            raise self._lost

    async def sleep(self) -> None:
        """Nothing is computed, nor kept, until `wake`."""
        self._batch.forget()

    async def wake(self) -> None:
        """Take as long as the weights take to come back from the host's memory."""
        await asyncio.sleep(self._wake_s)

    async def close(self) -> None:
        self.crash("the engine was closed")
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def crash(self, reason: str) -> None:
        """Die as an engine process does: every stream ends with UnitLost, and so does each later call."""
        if self._lost is None:
            self._lost = UnitLost(reason)
            self._work.set()
            for answer in list(self._answers.values()):
                answer.lose(self._lost)

    async def _run(self) -> None:
        batch, clock, answers = self._batch, time.monotonic, self._answers
        due = clock()
        while self._lost is None:
            if not (batch.running or batch.waiting):
                self._work.clear()
                await self._work.wait()
                due = clock()
                continue
            seconds = batch.begin_step()
            due = max(due, clock() - MAX_CATCH_UP_S) + seconds
            await asyncio.sleep(0 if self._full_speed else max(0.0, due - clock()))
            self._measure(seconds)
            for request in batch.end_step():
                # A step of one may end another: whoever reads it can cancel what it likes.
                if (answer := answers.get(request)) is not None:
                    answer.advance()

    def _measure(self, seconds: float) -> None:
        batch = self._batch
        if batch.scheduled_tokens > 2 * batch.scheduled_requests:
            self._prefill_tokens_per_s = follow(self._prefill_tokens_per_s, batch.scheduled_tokens / seconds)
        else:
            self._decode_ms = follow(self._decode_ms, seconds * 1e3)


class _Answer:
    """One generation in the batch, and where its steps go."""

    __slots__ = ("_breaks_after", "_end_reason", "_engine", "_index", "_key", "_request", "_sink")

    def __init__(
        self,
        engine: SimulatedEngine,
        request: Request,
        sink: Sink,
        *,
        key: int,
        index: int,
        end_reason: FinishReason,
        breaks_after: int,
    ) -> None:
        self._engine = engine
        self._request = request
        self._sink = sink
        self._key = key
        self._index = index
        self._end_reason = end_reason
        self._breaks_after = breaks_after
        """Tokens that are still given before a simulated fault; 0 for none."""

    def advance(self) -> None:
        """The request has its next token."""
        request = self._request
        token = text.answer_token(self._key, self._index)
        self._index += 1
        finished = request.finished
        step = Step(
            (token,),
            text.VOCABULARY[token],
            self._end_reason if finished else None,
            request.cached_tokens,
            request.take_seconds(),
        )
        self._sink.step(step)
        self._breaks_after -= 1
        if self._breaks_after == 0:
            self._release(InternalError("a fault that `simulated.fail_every` asks for"))
        elif finished:
            self._release(None)

    def end_at_once(self) -> None:
        """There is nothing to generate. Not in the caller's own call, which still has to return."""
        if self._engine._answers.get(self._request) is self:
            self._sink.step(Step((), "", FinishReason.STOP, 0, 0.0))
            self._release(None)

    def cancel(self) -> None:
        self._release(None)

    def lose(self, error: UnitLost) -> None:
        self._release(error)

    def _release(self, error: GridError | None) -> None:
        if self._engine._answers.pop(self._request, None) is not None:
            self._engine._batch.abort(self._request)
            self._sink.released(error)


def kv_tokens(model: Model) -> int:
    """Return the KV cache's size in tokens: what `kv_cache_mb` says where it is set, else what the weights
    leave of the memory grant (by default, of the GPUs' own memory); never less than one whole context."""
    parameters_b = variants.parameters_b(model)
    if "kv_cache_mb" in model.model_fields_set:
        free_mb = float(model.kv_cache_mb)
    else:
        granted_mb = variants.memory_mb(model, variants.pretended_gpu(model))
        weights_mb = catalogue.weights_mb(parameters_b, Precision.parse(model.precision))
        free_mb = granted_mb * GPU_MEMORY_SHARE - weights_mb
    tokens = int(free_mb * 2**20 / catalogue.kv_bytes_per_token(parameters_b))
    whole_context = -(-(model.context_tokens + 1) // BLOCK_TOKENS) * BLOCK_TOKENS
    return max(tokens, whole_context)
