"""Figures against truth: what two replicas say of mixed calls equals a separate count of these calls."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from support.calls import declared, events, generation
from support.local_cell import CHAT_MODEL, LocalCell, cell_config, local_cell

from gateway.http.shapes.metrics import Explanation, MetricsView, UsageAnswer
from gateway.http.shapes.pipelines import PipelineView, StepMetricsView
from gateway.observe.histogram import RELATIVE_ERROR
from gateway.observe.recorder import Recorder
from gateway.observe.story import Outcome, Story
from grid.config import Config
from grid.units import events as ev

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

FIGURES_AGE_S = 10.0
SLOW, DOOMED = "sim-slow", "sim-doomed"


def with_more_models(config: Config) -> Config:
    """Add one that takes seconds for an answer, and one that will die."""
    chat = next(model for model in config.models if model.name == CHAT_MODEL)
    timed = chat.simulated.model_copy(update={"full_speed": False})
    more = [chat.model_copy(update={"name": name, "simulated": timed}) for name in (SLOW, DOOMED)]
    return config.model_copy(update={"models": (*config.models, *more)})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cell(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCell]:
    config = with_more_models(cell_config(Path(tmp_path_factory.mktemp("cell"))))
    async with local_cell(config, replicas=2) as running:
        yield running


@dataclass
class Truth:
    """What the callers of one pipeline saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    usage: Counter[str] = field(default_factory=Counter)
    cu_seconds: float = 0.0

    def saw(self, outcome: str, usage: dict[str, Any] | None = None) -> None:
        self.outcomes[outcome] += 1
        for name in ("input_tokens", "cached_tokens", "output_tokens"):
            self.usage[name] += usage[name] if usage else 0
        self.cu_seconds += usage["cu_seconds"] if usage else 0.0

    @property
    def calls(self) -> int:
        return self.outcomes.total()


async def generating(client: httpx.AsyncClient, model: str = CHAT_MODEL, tokens: int = 8) -> str:
    return await declared(client, generation(model=model, max_output_tokens=tokens))


async def good(client: httpx.AsyncClient, pipeline_id: str, truth: Truth) -> None:
    answer = await client.post(f"/v1/pipelines/{pipeline_id}/invoke", json={"input": "x", "stream": False})
    assert answer.status_code == 200, answer.text
    truth.saw("good", answer.json()["usage"])


async def streamed(client: httpx.AsyncClient, pipeline_id: str, truth: Truth) -> None:
    answer = await client.post(f"/v1/pipelines/{pipeline_id}/invoke", json={"input": "x"})
    name, data = events(answer.text)[-1]
    assert name == "done"
    truth.saw("good", data["usage"])


async def chatted(client: httpx.AsyncClient, pipeline_id: str, truth: Truth) -> None:
    """Through another route; its usage has no compute in it, so the pipeline's own answer is asked for."""
    body = {"model": pipeline_id, "messages": [{"role": "user", "content": "x"}]}
    answer = await client.post("/v1/chat/completions", json=body)
    used = answer.json()["usage"]
    truth.saw(
        "good",
        {
            "input_tokens": used["prompt_tokens"],
            "cached_tokens": used["prompt_tokens_details"]["cached_tokens"],
            "output_tokens": used["completion_tokens"],
            "cu_seconds": 0.0,
        },
    )


async def refused(client: httpx.AsyncClient, pipeline_id: str, truth: Truth) -> None:
    answer = await client.post(f"/v1/pipelines/{pipeline_id}/invoke", json={"inptu": "x"})
    assert answer.status_code == 400
    truth.saw("refused")


async def too_long(client: httpx.AsyncClient, pipeline_id: str, truth: Truth) -> None:
    answer = await client.post(f"/v1/pipelines/{pipeline_id}/invoke", json={"input": "word " * 6000})
    assert answer.status_code == 400, answer.text
    truth.saw("refused")


async def cancelled(client: httpx.AsyncClient, pipeline_id: str, truth: Truth) -> None:
    path = f"/v1/pipelines/{pipeline_id}/invoke"
    async with client.stream("POST", path, json={"input": "x"}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("event: token"):
                break
    truth.saw("cancelled")


async def broken(client: httpx.AsyncClient, pipeline_id: str, truth: Truth) -> None:
    """Runs until its unit dies, or is refused for want of one."""
    answer = await client.post(f"/v1/pipelines/{pipeline_id}/invoke", json={"input": "x"})
    if answer.status_code == 200:
        name, data = events(answer.text)[-1]
        assert name == "error", answer.text
        truth.saw("failed", data["error"]["details"]["usage"])
    else:
        assert answer.status_code == 503
        # One that was accepted, but had no text yet, says what it took.
        truth.saw("failed", answer.json()["error"]["details"].get("usage"))


class Taps:
    """Sees every story that the replicas take, for the exact times."""

    def __init__(self, cell: LocalCell, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stories: list[Story] = []
        take = Recorder.take

        def tapped(recorder: Recorder, story: Story) -> None:
            self.stories.append(story)
            take(recorder, story)

        monkeypatch.setattr(Recorder, "take", tapped)
        self._replicas = [services for _, services in cell.replicas]

    async def until(self, calls: int) -> None:
        """Return when so many calls have ended, and all of them are in Redis."""
        async with asyncio.timeout(20):
            while len(self.stories) < calls:  # noqa: ASYNC110  a cancelled call's end is nobody's answer
                await asyncio.sleep(0.01)
            while any(services.runner._farewells._under_way for services in self._replicas):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for services in self._replicas:
            await services.recorder.flush()


async def test_figures_of_mixed_calls_over_two_replicas_are_true(
    cell: LocalCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    taps = Taps(cell, monkeypatch)
    dice = random.Random(3)
    async with cell.client() as one, cell.client(replica=1) as two:
        steady, long, doomed = (
            await generating(one),
            await generating(one, SLOW, 3000),
            await generating(one, DOOMED, 2000),
        )
        truths = {steady: Truth(), long: Truth(), doomed: Truth()}
        kinds = [(good, 140), (streamed, 120), (refused, 80), (too_long, 20)]
        calls = [(kind, steady) for kind, count in kinds for _ in range(count)]
        calls += [(cancelled, long)] * 60 + [(chatted, steady)] * 40
        dice.shuffle(calls)
        gate = asyncio.Semaphore(24)

        async def call(number: int, kind: Any, pipeline_id: str) -> None:
            async with gate:
                await kind((one, two)[number % 2], pipeline_id, truths[pipeline_id])

        await asyncio.gather(*(call(n, kind, pipeline) for n, (kind, pipeline) in enumerate(calls)))
        dying = [asyncio.create_task(broken((one, two)[n % 2], doomed, truths[doomed])) for n in range(20)]
        unit = cell.units[f"{DOOMED}-0"]._ready
        while (await cell.running())[f"{DOOMED}-0"] < len(dying):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        unit.apply(ev.EngineDied("pulled out by a test"))
        await asyncio.gather(*dying)
        await asyncio.gather(*(broken((one, two)[n % 2], doomed, truths[doomed]) for n in range(20)))
        made = sum(truth.calls for truth in truths.values())
        assert made == 500
        await taps.until(made)

        step = await _step_metrics(two, steady)
        assert step.calls == truths[steady].calls - 80, "a body that is no call never comes to a step"
        assert step.errors == 20
        assert step.tokens == truths[steady].usage["input_tokens"] + truths[steady].usage["output_tokens"]
        assert step.p50_ms is not None
        assert (await _step_metrics(one, doomed)).errors == truths[doomed].calls

        for pipeline_id, truth in truths.items():
            await _check(one, two, pipeline_id, truth, taps)
        tenant = (await two.get("/v1/usage")).json()
        assert tenant["total"]["calls"] == 500
        everything = MetricsView.model_validate((await two.get("/v1/metrics")).json())
        failed = truths[doomed].calls
        assert everything.metrics.error_rate_5xx == pytest.approx(failed / 500)


async def test_figures_of_any_replica_are_never_older_than_ten_seconds(cell: LocalCell) -> None:
    """Nobody writes or forgets anything by hand here: what is waited for is the promise itself."""
    async with cell.client() as one, cell.client(replica=1) as two:
        pipeline_id = await generating(one)
        asked = {"pipeline_id": pipeline_id}

        async def rate() -> float:
            shown = MetricsView.model_validate((await two.get("/v1/metrics", params=asked)).json())
            return shown.metrics.request_rate_per_second

        for _call in range(2):
            before = await rate()
            await good(one, pipeline_id, Truth())
            async with asyncio.timeout(FIGURES_AGE_S):
                while await rate() <= before:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)


async def test_a_call_can_be_explained_by_any_replica_but_not_to_others(cell: LocalCell) -> None:
    other_key = await cell.tenant("other")
    async with cell.client() as one, cell.client(replica=1) as two, cell.client(other_key) as other:
        pipeline_id = await generating(one)
        said = "secret words of a prompt"
        path = f"/v1/pipelines/{pipeline_id}/invoke"
        answer = await one.post(path, json={"input": said, "stream": False})
        request_id = answer.headers["x-request-id"]
        await cell.services.recorder.flush()
        told = await two.get(f"/v1/requests/{request_id}")
        assert (await other.get(f"/v1/requests/{request_id}")).status_code == 404
        assert (await one.get("/v1/requests/req_none")).status_code == 404
    assert said not in told.text
    assert answer.json()["output"] not in told.text
    shown = Explanation.model_validate(told.json())
    assert (shown.outcome, shown.pipeline_id, shown.status) == ("good", pipeline_id, 200)
    assert shown.usage.model_dump() == answer.json()["usage"]
    (step,) = shown.runs[0].steps
    assert step.placements[0].chosen.unit_id == answer.json()["placement"][0]["unit_id"]
    assert step.placements[0].outcome == "done"
    assert step.placements[0].rejected_by_code, "units of other models are no candidates"
    assert step.actual is not None
    assert step.actual.total_ms == answer.json()["timing"][0]["total_ms"]


async def test_the_scrape_of_any_replica_is_of_the_whole_cell(cell: LocalCell) -> None:
    async with cell.client(cell.operator_key) as one, cell.client(cell.operator_key, replica=1) as two:
        for _, services in cell.replicas:
            await services.recorder.flush()
        texts = [(await client.get("/metrics")).text for client in (one, two)]
    counted = [
        [line for line in text.split("\n") if line.startswith("zerogrid_requests_total")] for text in texts
    ]
    assert counted[0] == counted[1] != []
    assert 'zerogrid_unit_running{gpu_type="H100",model_name="sim-8b",region="eu-central-1"' in texts[0]
    async with cell.client() as tenant, cell.client("") as nobody:
        assert (await tenant.get("/metrics")).status_code == 403
        assert (await nobody.get("/metrics")).status_code == 401


async def test_the_flag_of_a_burst_is_in_a_header_and_hardware_in_detail(cell: LocalCell) -> None:
    async with cell.client() as client:
        peek = await client.head("/v1/metrics")
        assert (peek.status_code, peek.content) == (200, b"")
        assert peek.headers["x-burst-detection-active"] in ("true", "false")
        shown = MetricsView.model_validate(
            (await client.get("/v1/metrics", params={"detail": "hardware"})).json()
        )
        assert shown.hardware is not None
        assert {unit.unit_id for unit in shown.hardware} == set(cell.units)
        assert (await client.get("/v1/metrics", params={"pipeline_id": "pl-0"})).status_code == 404
        assert (await client.head("/v1/metrics", params={"pipeline_id": "pl-0"})).status_code == 404
        assert (await client.get("/v1/metrics", params={"detail": "soft"})).status_code == 400


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ({"since": "2000-01-01T00:00:00Z"}, 200),
        ({"until": "0001-01-01T00:00:00Z"}, 200),
        ({"since": "9999-12-31T23:59:59-14:00"}, 400),
        ({"since": "2030-01-02T00:00:00Z", "until": "2030-01-01T00:00:00Z"}, 400),
        ({"since": "9000-01-01T00:00:00Z"}, 400),
        ({"until": "9000-01-01T00:00:00Z"}, 200),
        ({"since": "yesterday"}, 400),
    ],
)
async def test_usage_is_asked_for_by_moments(cell: LocalCell, asked: dict[str, str], status: int) -> None:
    async with cell.client() as client:
        answer = await client.get("/v1/usage", params=asked)
    assert answer.status_code == status, answer.text
    if status == 200:
        UsageAnswer.model_validate(answer.json())


async def _step_metrics(client: httpx.AsyncClient, pipeline_id: str) -> StepMetricsView:
    view = PipelineView.model_validate((await client.get(f"/v1/pipelines/{pipeline_id}")).json())
    assert view.step_metrics is not None
    (step,) = view.step_metrics
    return step


async def _cu_per_s(client: httpx.AsyncClient, pipeline_id: str) -> float:
    """Return the compute that the ready units of a pipeline's only model give in a second."""
    (step,) = (await client.get(f"/v1/pipelines/{pipeline_id}")).json()["contract"]["pipeline"]["steps"]
    units = (await client.get("/v1/units")).json()["units"]
    return float(sum(u["cu_factor"] for u in units if (u["model"], u["state"]) == (step["model"], "ready")))


async def _check(
    one: httpx.AsyncClient, two: httpx.AsyncClient, pipeline_id: str, truth: Truth, taps: Taps
) -> None:
    for client in (one, two):
        answer = await client.get("/v1/metrics", params={"pipeline_id": pipeline_id})
        shown = MetricsView.model_validate(answer.json()).metrics
        # The window is of 60 to 65 seconds, and all calls are in it.
        assert truth.calls / 65 <= shown.request_rate_per_second * 1.001
        assert shown.request_rate_per_second <= truth.calls / 60 * 1.001
        assert shown.error_rate_5xx == pytest.approx(truth.outcomes["failed"] / truth.calls, abs=1e-6)
        times = sorted(
            story.total_ms
            for story in taps.stories
            if story.pipeline_id == pipeline_id and story.outcome is Outcome.GOOD
        )
        assert len(times) == truth.outcomes["good"]
        if times:
            exact = times[math.ceil(0.99 * len(times)) - 1]
            assert shown.p99_latency_ms == pytest.approx(exact, rel=RELATIVE_ERROR + 1e-3)
        else:
            assert shown.p99_latency_ms is None
        usage = UsageAnswer.model_validate(
            (await client.get("/v1/usage", params={"pipeline_id": pipeline_id})).json()
        )
        assert usage.total.calls == truth.calls
        assert sum(hour.calls for hour in usage.hours) == truth.calls
        counted = Counter(story.outcome.value for story in taps.stories if story.pipeline_id == pipeline_id)
        assert counted == truth.outcomes
        told = sum(s.usage.cu_seconds for s in taps.stories if s.pipeline_id == pipeline_id)
        assert usage.total.cu_seconds == pytest.approx(told, abs=1e-6 * truth.calls)
        # Of what the ready units of the pipeline's model could have done in the window; none is left of one.
        worth = await _cu_per_s(client, pipeline_id)
        least, most = (min(100 * told / (worth * s), 100) if worth else 0.0 for s in (65, 60))
        assert least * 0.999 - 0.001 <= shown.cu_utilization_pct <= most * 1.001 + 0.001
        assert (shown.cu_utilization_pct > 0) == (worth > 0)
        if truth.outcomes["cancelled"]:
            assert usage.total.output_tokens >= truth.outcomes["cancelled"]
            assert usage.total.cu_seconds > 0, "who leaves pays for what was generated"
            continue
        assert usage.total.input_tokens == truth.usage["input_tokens"]
        assert usage.total.output_tokens == truth.usage["output_tokens"]
        assert usage.total.cached_tokens == truth.usage["cached_tokens"]
        if shown.cache_hit_ratio is not None:
            expected = truth.usage["cached_tokens"] / truth.usage["input_tokens"]
            assert shown.cache_hit_ratio == pytest.approx(expected, abs=1e-6)
