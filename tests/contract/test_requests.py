"""Requests that people send to services of this kind are accepted as they stand, and mean what they say."""

from __future__ import annotations

import pytest
from support.shared import contract_folder

from gateway.pipeline.contract import Contract, Part, parse
from gateway.pipeline.invocation import Invocation, OneShot

REQUESTS = contract_folder()
ROUTES: dict[str, type[Part]] = {
    "one_shot": OneShot,
    "hints": OneShot,
    "stream_control": OneShot,
    "semantic_cache": OneShot,
    "quantization": OneShot,
    "rag": Contract,
    "support_pipeline": Contract,
    "invoke": Invocation,
    "dry_run": Invocation,
}

NOT_SERVED = {"data_source_pinecone"}

pytestmark = pytest.mark.skipif(
    not REQUESTS.is_dir(), reason=f"{REQUESTS} is absent: put the field's requests beside GRID_DATA"
)


def test_every_request_has_a_route() -> None:
    assert {file.stem for file in REQUESTS.glob("*.json")} == ROUTES.keys() | NOT_SERVED


@pytest.mark.parametrize("name", sorted(ROUTES))
def test_parses_and_survives_being_stored(name: str) -> None:
    model = ROUTES[name]
    parsed = parse(model, (REQUESTS / f"{name}.json").read_bytes())
    assert model.model_validate_json(parsed.model_dump_json(exclude_unset=True)) == parsed


def one_shot(name: str) -> OneShot:
    return parse(OneShot, (REQUESTS / f"{name}.json").read_bytes())


def test_without_input_there_is_nothing_to_run() -> None:
    assert one_shot("one_shot").invocation is None
    called = one_shot("hints").invocation
    assert called is not None
    assert called.input == "How do I reset my password?"


def test_fields_arrive() -> None:
    hints = one_shot("hints").contract.execution_hints
    assert hints.min_gpu_memory_mb == 12_000
    assert hints.prefer_region == ("us-west-2", "ap-northeast-1")
    assert hints.avoid_models == ("claude-3-haiku",)
    control = one_shot("stream_control").contract.stream_control
    assert (control.min_tokens_per_chunk, control.max_latency_ms, control.flush_on_eos) == (16, 200, True)
    assert one_shot("quantization").contract.execution_hints.quantization == "int4"
    cache = one_shot("semantic_cache").contract.cache_strategy
    assert (cache.type, cache.similarity_threshold, cache.ttl_seconds) == ("semantic", 0.85, 3600)


def test_the_support_pipeline() -> None:
    contract = parse(Contract, (REQUESTS / "support_pipeline.json").read_bytes())
    (retrieval,) = contract.pipeline.retrievals
    generation = contract.pipeline.generation
    assert retrieval.data_source_id == "ds-abc123"
    assert retrieval.filter == {"status": "published"}
    assert (retrieval.id, retrieval.top_k, retrieval.on_failure) == ("retrieval-1", 3, "fail")
    assert generation is not None
    assert generation.id == "generation-2"
    assert generation.temperature == 0.3
