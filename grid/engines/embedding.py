"""Embeddings by an ONNX sentence encoder on CPU cores: mean pooling, unit length.

Calls that wait at the same time share a batch. One worker task owns the model; the computing runs in one
thread, so the event loop stays free.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from grid.config import Model
from grid.engines import models
from grid.engines.base import EngineFacts, EngineLoad
from grid.engines.meter import follow
from grid.errors import InternalError, UnitLost
from grid.words import UNKNOWN, Precision

WINDOW_TOKENS = 256
"""The encoder was trained on this window; longer texts are cut there and counted."""

BATCH_TEXTS = 16
"""Texts of one run: enough to use the cores, little enough that a query behind a bulk load waits for
one run only."""

BATCH_PADDED_TOKENS = 2048
"""Rows times the longest of them: bounds the time (about 0.4 s on two cores) and memory of one run."""

THREADS = 2
"""More would take cores from the language model beside it for little gain at these sizes."""

WINDOW_CHARACTERS = 64 * WINDOW_TOKENS
"""A text is cut here before tokenising, so that a giant one costs no more than a long one. Ordinary text
fills the window with a tenth of it; what is cut counts as truncated."""


@dataclass(frozen=True, slots=True)
class _Encoded:
    ids: list[int]
    truncated: bool


@dataclass(slots=True, eq=False)
class _Call:
    """One `embed` call: its texts, the rows to fill, and who waits."""

    encoded: list[_Encoded]
    rows: npt.NDArray[np.float32]
    done: asyncio.Future[None]
    left: int


class OnnxEmbeddingEngine:
    """Implements `grid.engines.base.EmbeddingEngine`. Its queue is bounded by the unit's admission."""

    def __init__(self, model: Model, cache_dir: Path, progress: models.Progress = models.silent) -> None:
        self._model = model
        self._cache_dir = cache_dir
        self._progress = progress
        self._encoder: _Encoder | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embed")
        self._queue: deque[tuple[_Call, int]] = deque()
        self._work = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._running = 0
        self._steps = 0
        self._tokens_per_s = UNKNOWN
        self.truncated_texts = 0
        """Texts so far that were longer than the window; their vectors stand for their beginning only."""

    async def start(self) -> EngineFacts:
        in_thread = asyncio.get_running_loop().run_in_executor
        self._encoder = await in_thread(
            self._thread, _Encoder.load, self._model.source, self._cache_dir, self._progress
        )
        self._worker = asyncio.create_task(self._run(), name=f"embedding-{self._model.name}")
        return EngineFacts(
            model=self._model.name,
            precision=Precision.parse(self._model.precision),
            fingerprint=self._encoder.fingerprint,
            context_tokens=min(self._model.context_tokens, WINDOW_TOKENS),
            dimension=self._encoder.dimension,
        )

    async def embed(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.float32], int]:
        """See the protocol. A text longer than the window is cut there and counted in `truncated_texts`."""
        encoder = self._ready()
        rows = np.empty((len(texts), encoder.dimension), np.float32)
        if not texts:
            return rows, 0
        loop = asyncio.get_running_loop()
        encoded = await loop.run_in_executor(None, encoder.encode, texts)
        self._ready()
        call = _Call(encoded, rows, loop.create_future(), len(encoded))
        self._queue.extend((call, row) for row in range(len(encoded)))
        self._work.set()
        await call.done
        self.truncated_texts += sum(each.truncated for each in encoded)
        return rows, sum(len(each.ids) for each in encoded)

    def load(self) -> EngineLoad:
        return EngineLoad(
            running=self._running,
            waiting=len(self._queue),
            kv_tokens_free=0,
            kv_tokens_total=0,
            prefill_tokens_queued=sum(len(call.encoded[row].ids) for call, row in self._queue),
            steps=self._steps,
            prefill_tokens_per_s=self._tokens_per_s,
        )

    async def close(self) -> None:
        self._encoder = None
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait([self._worker])
        for call, _ in self._queue:
            _fail(call, UnitLost("the engine was closed"))
        self._queue.clear()
        await asyncio.to_thread(self._thread.shutdown)

    def _ready(self) -> _Encoder:
        if self._encoder is None:
            raise UnitLost("the embedding engine is not running")
        return self._encoder

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while self._queue:
                batch = self._next_batch()
                try:
                    await self._run_batch(loop, batch)
                except asyncio.CancelledError:
                    for call, _ in batch:
                        _fail(call, UnitLost("the engine was closed"))
                    raise
                except Exception as error:
                    for call, _ in batch:
                        _fail(call, InternalError(f"the embedding model failed: {type(error).__name__}"))
            self._work.clear()
            await self._work.wait()

    async def _run_batch(self, loop: asyncio.AbstractEventLoop, batch: list[tuple[_Call, int]]) -> None:
        ids = [call.encoded[row].ids for call, row in batch]
        self._running = len(batch)
        try:
            started = loop.time()
            vectors = await loop.run_in_executor(self._thread, self._ready().run, ids)
            tokens_per_s = sum(map(len, ids)) / max(1e-6, loop.time() - started)
        finally:
            self._running = 0
            self._steps += 1
        self._tokens_per_s = follow(self._tokens_per_s, tokens_per_s)
        for (call, row), vector in zip(batch, vectors, strict=True):
            call.rows[row] = vector
            call.left -= 1
            if call.left == 0 and not call.done.done():
                call.done.set_result(None)

    def _next_batch(self) -> list[tuple[_Call, int]]:
        """Take texts in order of arrival while the padded batch stays in bounds; skip those nobody awaits."""
        batch: list[tuple[_Call, int]] = []
        longest = 0
        while self._queue and len(batch) < BATCH_TEXTS:
            call, row = self._queue[0]
            if not call.done.done():
                longest = max(longest, len(call.encoded[row].ids))
                if batch and longest * (len(batch) + 1) > BATCH_PADDED_TOKENS:
                    break
                batch.append((call, row))
            self._queue.popleft()
        return batch


def _fail(call: _Call, error: Exception) -> None:
    if not call.done.done():
        call.done.set_exception(error)


class _Encoder:
    """The model and its tokenizer. Both methods are thread-safe and free the GIL for their long part."""

    def __init__(self, session: Any, tokenizer: Any, dimension: int, fingerprint: str) -> None:
        self._session = session
        self._tokenizer = tokenizer
        self.dimension = dimension
        self.fingerprint = fingerprint

    @classmethod
    def load(cls, source: str, cache_dir: Path, progress: models.Progress) -> _Encoder:
        try:
            onnxruntime: Any = importlib.import_module("onnxruntime")
            from tokenizers import Tokenizer
        except ImportError as error:
            raise InternalError(
                f"an embedding unit needs onnxruntime and tokenizers ({error}): pip install 'zerogrid[cpu]'"
            ) from error
        folder = models.resolve(source, cache_dir, progress)
        path = folder / "model.onnx"
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = THREADS
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.no_padding()
        # One more than the window, so that a text that was cut can be told from one that just fits.
        tokenizer.enable_truncation(WINDOW_TOKENS + 1)
        dimension = int(session.get_outputs()[0].shape[-1])
        digest = hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
        return cls(session, tokenizer, dimension, f"onnx/{digest}/onnxruntime-{onnxruntime.__version__}")

    def encode(self, texts: Sequence[str]) -> list[_Encoded]:
        cut = [text[:WINDOW_CHARACTERS] for text in texts]
        encoded = []
        for text, kept, encoding in zip(texts, cut, self._tokenizer.encode_batch_fast(cut), strict=True):
            ids = encoding.ids
            too_long = len(ids) > WINDOW_TOKENS
            if too_long:
                ids = [*ids[: WINDOW_TOKENS - 1], ids[-1]]
            encoded.append(_Encoded(ids, too_long or len(kept) < len(text)))
        return encoded

    def run(self, batch: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        """Return one unit-length row for each sequence of ids."""
        longest = max(map(len, batch))
        ids = np.zeros((len(batch), longest), np.int64)
        mask = np.zeros_like(ids)
        for row, sequence in enumerate(batch):
            ids[row, : len(sequence)] = sequence
            mask[row, : len(sequence)] = 1
        feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        hidden = self._session.run(None, feed)[0]
        pooled = (hidden * mask[..., None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
        unit = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
        return np.asarray(unit, np.float32)
