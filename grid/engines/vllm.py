"""vLLM behind the engine protocol: one AsyncLLM in the unit's event loop, its EngineCore a child process.

vLLM gives token ids and nothing else; prompts and text are `prompt.py`'s and `decoder.py`'s work. What a
process needs before it starts is in `environment.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from types import ModuleType
from typing import Any

from grid.config import Model
from grid.engines import models
from grid.engines.adaptive import Adaptive, Limits
from grid.engines.arguments import Checkpoint, engine_arguments, read_checkpoint
from grid.engines.base import EngineFacts, EngineLoad, Generation, Prepared, Sink, Step
from grid.engines.decoder import Decoder, Detokenizer
from grid.engines.meter import Meter, Stay
from grid.engines.packing import check_room
from grid.engines.prompt import PromptBuilder
from grid.errors import InternalError, InvalidRequest, UnitLost
from grid.hardware import catalogue
from grid.hardware.catalogue import GpuModel
from grid.words import UNKNOWN, FinishReason, Message, Precision

log = logging.getLogger(__name__)

SHUTDOWN_S = 1.0
"""vLLM's default waits 5 s for a process that has nothing to save."""

ADAPT_PERIOD_S = 0.1
"""How often it is looked whether memory is short: a few engine steps."""

LONG_PROMPT_THREADS = 2
"""Long prompts tokenised at once. A thread can't be stopped, so what a caller abandons runs to its end; the
others wait their turn, and one that was abandoned meanwhile is never begun."""

FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class VLLMEngine:
    """Implements `grid.engines.base.Engine`."""

    def __init__(
        self,
        model: Model,
        cache_dir: Path,
        progress: models.Progress = models.silent,
        gpu: GpuModel = catalogue.GPUS["CPU"],
    ) -> None:
        self._model = model
        self._gpu = gpu
        self._precision = Precision.parse(model.precision)
        self._cache_dir = cache_dir
        self._progress = progress
        self._meter = Meter(max_running=model.max_running)
        self._adapter: ModuleType
        self._llm: Any = None
        self._long_prompts = ThreadPoolExecutor(LONG_PROMPT_THREADS, thread_name_prefix="tokenise")
        self._tasks: set[asyncio.Task[None]] = set()
        self._adapting: asyncio.Task[None] | None = None
        self._prompts: PromptBuilder
        self._detokenizer: Detokenizer
        self._end_ids: list[int] = []

    async def start(self) -> EngineFacts:
        """Load the model. vLLM wants to be built inside the loop and blocks it for tens of seconds."""
        model = self._model
        folder = await asyncio.to_thread(models.resolve, model.source, self._cache_dir, self._progress)
        checkpoint = await asyncio.to_thread(read_checkpoint, folder)
        arguments = engine_arguments(model, checkpoint, self._gpu)
        self._prompts = PromptBuilder(folder, model.context_tokens)
        self._detokenizer = Detokenizer(folder / "tokenizer.json")
        self._end_ids = end_ids(folder)
        try:
            from grid.engines import vllm_adapter
        except ImportError as error:
            extra = "cuda" if model.gpus else "cpu"
            raise InternalError(
                f"vLLM can't be used here ({error}): pip install 'zerogrid[{extra}]'"
            ) from error
        self._adapter = vllm_adapter
        try:
            self._llm, self._meter.kv_tokens_total = vllm_adapter.build(arguments, self._meter)
        except Exception as error:
            raise InternalError(
                f"vLLM could not load {model.name} from {folder}: {type(error).__name__}: {error}"
            ) from error
        if model.adaptive:
            full = Limits(arguments["max_num_batched_tokens"], model.max_running)
            self._meter.limits = full
            self._adapting = asyncio.create_task(self._adapt(Adaptive(full)))
        digest = await asyncio.to_thread(weights_digest, folder)
        prefill_tokens_per_s, decode_ms_per_token = self._priors(checkpoint)
        return EngineFacts(
            model=model.name,
            precision=self._precision,
            fingerprint=f"{vllm_adapter.kernels()}/{computed_as(arguments, self._precision)}/{digest}",
            context_tokens=model.context_tokens,
            kv_tokens_total=self._meter.kv_tokens_total,
            prefill_tokens_per_s=prefill_tokens_per_s,
            decode_ms_per_token=decode_ms_per_token,
        )

    def _priors(self, checkpoint: Checkpoint) -> tuple[float, float]:
        """Return the catalogue's guess at prefill tokens per second and at ms per decoded token."""
        parameters_b = checkpoint.parameters_b(self._precision)
        if not parameters_b:
            return UNKNOWN, UNKNOWN
        work = (self._gpu, parameters_b, self._precision, self._model.gpus)
        return catalogue.prefill_tokens_per_s(*work), catalogue.decode_ms_per_token(*work)

    async def prepare(
        self, messages: Sequence[Message], documents: Sequence[str], max_output_tokens: int
    ) -> Prepared:
        build = self._prompts.build
        if self._prompts.is_long(messages, documents):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(
                self._long_prompts, build, messages, documents, max_output_tokens
            )
        return build(messages, documents, max_output_tokens)

    def generate(self, generation: Generation, sink: Sink) -> asyncio.Task[None]:
        sampling, emitted = generation.sampling, generation.emitted_ids
        tokens = len(generation.prompt.prompt_ids) + len(emitted)
        if sampling.max_output_tokens < 1:
            raise InvalidRequest("max_output_tokens must be at least 1", param="max_output_tokens")
        # vLLM would silently cut the answer short.
        check_room(tokens, sampling.max_output_tokens, self._model.context_tokens)
        if self._llm is None:
            raise UnitLost("the engine is not running")
        text = self._detokenizer.stream(generation.prompt.prompt_ids, emitted, generation.emitted_code_points)
        if emitted and emitted[-1] in self._end_ids:
            # It had ended: only the word of it was lost with its unit.
            task = asyncio.create_task(_say_end(sink))
        else:
            prompt, parameters = self._adapter.request(generation, self._end_ids)
            outputs = self._llm.generate(
                prompt, parameters, generation.engine_id, priority=generation.priority
            )
            task = asyncio.create_task(self._pump(outputs, generation, text, sink))
        self._tasks.add(task)
        # Not a `finally` in the task: one that is cancelled before its first step runs no code.
        task.add_done_callback(lambda ended: self._ended(ended, sink))
        return task

    async def _adapt(self, adaptive: Adaptive) -> None:
        """Keep the engine's limits at what its memory allows."""
        while True:
            await asyncio.sleep(ADAPT_PERIOD_S)
            limits = adaptive.handle(self._meter.sample(), time.monotonic())
            if limits == self._meter.limits:
                continue
            try:
                await self._adapter.limit(self._llm, limits)
            except Exception as error:
                # Whoever has a stream in it, or asks for its health, hears that the engine is dead.
                log.warning("the engine takes no limits any more: %s", self._adapter.translated(error))
                return
            log.info("%s: prompts by %d tokens a step, %d requests at once", self._model.name, *limits)
            self._meter.limits = limits

    async def _pump(
        self, outputs: AsyncGenerator[Any, None], generation: Generation, text: Decoder, sink: Sink
    ) -> None:
        """Turn vLLM's outputs into steps."""
        prompt_ids, emitted = generation.prompt.prompt_ids, generation.emitted_ids
        stay = self._meter.joined(len(prompt_ids) + len(emitted), time.monotonic())
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    if not stay.started:
                        self._note_prefill(stay, output)
                    completion = output.outputs[0]
                    ids = tuple(completion.token_ids)
                    new_text = text.feed(ids)
                    reason = None
                    if output.finished:
                        new_text += text.finish()
                        reason = _finish_reason(completion.finish_reason)
                        self._meter.left(stay)
                    seconds = self._meter.take_seconds(stay)
                    sink.step(Step(ids, new_text, reason, output.num_cached_tokens or 0, seconds))
        except Exception as error:
            raise self._adapter.translated(error) from error
        finally:
            self._meter.left(stay)

    def _ended(self, task: asyncio.Task[None], sink: Sink) -> None:
        self._tasks.discard(task)
        sink.released(None if task.cancelled() else task.exception())

    def load(self) -> EngineLoad:
        return self._meter.load()

    async def check(self) -> None:
        try:
            await self._llm.check_health()
        except Exception as error:
            raise UnitLost(f"the engine is not healthy: {type(error).__name__}") from error

    async def sleep(self) -> None:
        """Move the weights to the host's memory and drop the KV cache: vLLM's first level of sleep."""
        await self._llm.sleep(1)

    async def wake(self) -> None:
        await self._llm.wake_up()

    async def close(self) -> None:
        self._long_prompts.shutdown(wait=False, cancel_futures=True)
        tasks = [*self._tasks, *filter(None, [self._adapting])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._llm is not None:
            llm, self._llm = self._llm, None
            await asyncio.to_thread(self._adapter.shut_down, llm, SHUTDOWN_S)

    def _note_prefill(self, stay: Stay, output: Any) -> None:
        computed = stay.prompt_tokens - (output.num_cached_tokens or 0)
        times = output.metrics
        self._meter.prefilled(stay, computed, times.first_token_ts - times.scheduled_ts if times else 0.0)


async def _say_end(sink: Sink) -> None:
    sink.step(Step((), "", FinishReason.STOP, 0, 0.0))


def _finish_reason(name: str | None) -> FinishReason:
    if name in FINISH_REASONS:
        return FINISH_REASONS[name]
    raise InternalError(f"the engine ended a request with {name!r}")


def computed_as(arguments: dict[str, Any], precision: Precision) -> str:
    """Return what of the engine's arguments changes the arithmetic, for the variant fingerprint."""
    parts = [precision.label]
    if "tensor_parallel_size" in arguments:
        parts.append(f"tp{arguments['tensor_parallel_size']}")
    if "kv_cache_dtype" in arguments:
        parts.append(f"kv-{arguments['kv_cache_dtype']}")
    return "+".join(parts)


def end_ids(folder: Path) -> list[int]:
    """Return the token ids that end an answer, from every place where a model may name them."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        named = json.loads(path.read_text("utf-8")).get("eos_token_id") if path.is_file() else None
        found.update([named] if isinstance(named, int) else named or [])
    if not found:
        raise InternalError(f"{folder.name} names no end-of-sequence token (eos_token_id)")
    return sorted(found)


DIGEST_SAMPLES = 16
DIGEST_SAMPLE_BYTES = 256 * 1024


def weights_digest(folder: Path) -> str:
    """Return a short hash of weights, tokenizer and template. Of each weights file its size, its header
    and evenly spaced samples are read: cheap at any size, and different for any retraining."""
    digest = hashlib.blake2b(digest_size=8)
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "tokenizer_config.json"):
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for sample in range(DIGEST_SAMPLES):
                file.seek(size * sample // DIGEST_SAMPLES)
                digest.update(file.read(DIGEST_SAMPLE_BYTES))
    return digest.hexdigest()
