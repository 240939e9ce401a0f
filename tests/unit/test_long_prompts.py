"""Long prompts are tokenised beside the loop, a bounded number at once, whatever their callers do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grid.config import Model
from grid.engines.base import Prepared
from grid.engines.vllm import LONG_PROMPT_THREADS, VLLMEngine
from grid.words import Message


class SlowPrompts:
    """A prompt builder whose every build waits for `go`."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun: list[str] = []
        self.began = threading.Semaphore(0)

    def is_long(self, messages: Sequence[Message], documents: Sequence[str]) -> bool:
        return True

    def build(self, messages: Sequence[Message], documents: Sequence[str], tokens: int) -> Prepared:
        self.begun.append(messages[0].text)
        self.began.release()
        self.go.wait()
        return Prepared((1, 2), b"hash", 0)


async def test_abandoned_long_prompts_do_not_pile_up(tmp_path: Path) -> None:
    model = Model(name="m", engine="vllm", source="package:none", precision="fp32")
    engine, prompts = VLLMEngine(model, tmp_path), SlowPrompts()
    engine_any: Any = engine
    engine_any._prompts = prompts

    def prepare(name: str) -> asyncio.Task[Prepared]:
        return asyncio.create_task(engine.prepare([Message("user", name)], [], 1))

    running = [prepare(f"running {index}") for index in range(LONG_PROMPT_THREADS)]
    abandoned = [prepare(f"abandoned {index}") for index in range(20)]
    kept = prepare("kept")
    for _ in running:
        await asyncio.to_thread(prompts.began.acquire)
    for task in abandoned:
        task.cancel()
    await asyncio.gather(*abandoned, return_exceptions=True)
    prompts.go.set()
    assert (await kept).prompt_ids == (1, 2)
    await asyncio.gather(*running)
    assert sorted(prompts.begun) == ["kept", *sorted(f"running {i}" for i in range(LONG_PROMPT_THREADS))]
    await engine.close()
