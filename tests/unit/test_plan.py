"""From contract and call to a plan: what is checked, resolved, filled in and warned of."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gateway.pipeline.contract import MAX_TEXT_CHARS, Contract, GenerationStep, parse
from gateway.pipeline.invocation import ChatMessage, Invocation
from gateway.pipeline.plan import Plan, plan_chat, plan_invocation, streams
from gateway.pipeline.resolution import check_models
from gateway.records import DataSourceRecord, Tenant
from gateway.trust.residency import ANYWHERE, Residency, parse_rule
from grid.config import Config
from grid.errors import Forbidden, GridError, InvalidRequest, NotFound, TooLarge
from grid.words import Message, Precision

CONFIG = Config.model_validate(
    {
        "models": [
            {"name": "chat-8b", "engine": "simulated"},
            {"name": "minilm", "engine": "embedding", "source": "package:p"},
            {"name": "other-embedder", "engine": "embedding", "source": "package:q"},
        ],
        "aliases": {
            "claude": {"model": "chat-8b", "ignore_dimension": True},
            "gpt": "chat-8b",
            "ada": {"model": "minilm", "ignore_dimension": True},
            "strict-ada": "minilm",
        },
        "gateway": {"default_deadline_s": 12},
    }
)
TENANT = Tenant("acme", "key-1", False, "salt")
SOURCE = DataSourceRecord("ds-1", "acme", "kb", "qdrant", {}, "eu-central-1", "minilm", 384, 9, "", "")
GENERATION: dict[str, Any] = {"type": "generation", "model": "chat-8b"}
RETRIEVAL: dict[str, Any] = {"type": "retrieval", "source": "kb", "id": "find"}


def plan(
    *steps: dict[str, Any],
    call: dict[str, Any] | None = None,
    residency: Residency = ANYWHERE,
    source: DataSourceRecord = SOURCE,
    **rest: Any,
) -> Plan:
    contract = parse(Contract, json.dumps({"pipeline": {"steps": steps}, **rest}).encode())
    invocation = parse(Invocation, json.dumps({"input": "How?", **(call or {})}).encode())
    return plan_invocation(
        contract,
        invocation,
        request_id="req_1",
        pipeline_id="pl-1",
        revision=3,
        tenant=TENANT,
        config=CONFIG,
        sources={step.id or "": source for step in contract.pipeline.retrievals},
        residency=residency,
    )


def refused(kind: type[GridError], *steps: dict[str, Any], **rest: Any) -> GridError:
    with pytest.raises(kind) as error:
        plan(*steps, **rest)
    return error.value


def messages(planned: Plan) -> tuple[Message, ...]:
    assert planned.generation is not None
    return planned.generation.messages


def test_a_generation_becomes_a_placement_request() -> None:
    planned = plan(
        {**GENERATION, "model": "gpt", "max_output_tokens": 7, "temperature": 0.3, "seed": 5, "stop": ["X"]},
        execution_hints={"min_gpu_memory_mb": 9, "prefer_region": ["a1", "b1"], "quantization": "int8"},
        call={"execution_hints": {"avoid_models": ["m"]}},
    )
    assert planned.model == "chat-8b"
    assert planned.time_limit_s == 12
    assert planned.step_ids == ("generation-1",)
    generation = planned.generation
    assert generation is not None
    asked = generation.placement
    assert asked.reservation_id == "req_1/generation-1/1"
    assert (asked.model, asked.max_output_tokens, asked.min_memory_mb) == ("gpt", 7, 9)
    assert (asked.prefer_regions, asked.avoid_models) == (("a1", "b1"), ("m",))
    assert asked.lowest_precision == Precision.INT8
    assert asked.prompt_tokens > 0
    assert (generation.sampling.temperature, generation.sampling.seed, generation.stops) == (0.3, 5, ("X",))


@pytest.mark.parametrize(
    ("step", "call", "expected"),
    [
        ({}, {}, True),
        ({"stream": False}, {}, False),
        ({"stream": False}, {"stream": True}, True),
        ({}, {"stream": False}, False),
    ],
)
def test_the_call_decides_how_it_is_answered(
    step: dict[str, Any], call: dict[str, Any], expected: bool
) -> None:
    contract = parse(Contract, json.dumps({"pipeline": {"steps": [{**GENERATION, **step}]}}).encode())
    invocation = parse(Invocation, json.dumps({"input": "How?", **call}).encode())
    assert streams(contract, invocation) is expected


def test_one_system_message_leads() -> None:
    turns = [
        {"role": "system", "content": "theirs"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    planned = plan({**GENERATION, "system_prompt": "ours"}, call={"input": None, "messages": turns})
    assert messages(planned)[0] == Message("system", "ours\n\ntheirs")
    assert [message.role for message in messages(planned)] == ["system", "user", "assistant", "user"]
    assert messages(plan(GENERATION)) == (Message("user", "How?"),)


# --- variables ------------------------------------------------------------------------------------


def test_variables_fill_system_prompt_and_input() -> None:
    planned = plan(
        {**GENERATION, "system_prompt": "Agent of {{ company }}."},
        call={
            "input": "About {{product}}: {{company}}?",
            "variables": {"company": "{{product}}", "product": "X"},
        },
    )
    assert messages(planned) == (
        Message("system", "Agent of {{product}}."),
        Message("user", "About X: {{product}}?"),
    ), "values are never expanded again"


def test_a_placeholder_needs_a_value_and_a_variable_a_placeholder() -> None:
    missing = refused(InvalidRequest, {**GENERATION, "system_prompt": "{{company}}"})
    assert missing.param == "variables.company"
    unknown = refused(InvalidRequest, GENERATION, call={"variables": {"compny": "x"}})
    assert unknown.param == "variables.compny"


def test_braces_of_end_users_are_text() -> None:
    assert (
        messages(plan(GENERATION, call={"input": "{{x}} in a template?"}))[-1].text == "{{x}} in a template?"
    )
    turns = [{"role": "user", "content": "{{company}}"}]
    planned = plan(
        {**GENERATION, "system_prompt": "{{company}}"},
        call={"input": None, "messages": turns, "variables": {"company": "Acme"}},
    )
    assert messages(planned) == (Message("system", "Acme"), Message("user", "{{company}}"))


def test_variables_cannot_blow_a_prompt_up() -> None:
    call = {"input": "{{a}}" * 100, "variables": {"a": "x" * (MAX_TEXT_CHARS // 50)}}
    assert refused(TooLarge, GENERATION, call=call).param == "variables.a"


# --- models and sources ---------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["nobody", "minilm", "ada"])
def test_a_model_that_the_cell_cannot_generate_with(model: str) -> None:
    error = refused(InvalidRequest, RETRIEVAL, {**GENERATION, "model": model})
    assert error.param == "pipeline.steps[1].model"
    assert "chat-8b" in error.message
    contract = parse(Contract, json.dumps({"pipeline": {"steps": [{**GENERATION, "model": model}]}}).encode())
    with pytest.raises(InvalidRequest) as same:
        check_models(contract, CONFIG)
    assert same.value.param == "pipeline.steps[0].model"


@pytest.mark.parametrize(
    "asked", [{"model": "minilm"}, {"model": "minilm", "dimension": 384}, {"model": "strict-ada"}]
)
def test_an_embedding_that_agrees(asked: dict[str, Any]) -> None:
    assert plan({**RETRIEVAL, "query_embedding": asked}, GENERATION).warnings == ()


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"model": "minilm", "dimension": 1536}, "dimension"),
        ({"model": "strict-ada", "dimension": 1536}, "dimension"),
        ({"model": "gpt", "dimension": 1536}, "dimension"),
        ({"model": "other-embedder"}, "model"),
        ({"model": "chat-8b"}, "model"),
        ({"model": "nobody"}, "model"),
    ],
)
def test_an_embedding_that_does_not(asked: dict[str, Any], field: str) -> None:
    error = refused(InvalidRequest, {**RETRIEVAL, "query_embedding": asked}, GENERATION)
    assert error.param == f"pipeline.steps[0].query_embedding.{field}"


@pytest.mark.parametrize("alias", ["ada", "claude"])
def test_an_alias_may_ignore_the_dimension_with_a_warning(alias: str) -> None:
    planned = plan({**RETRIEVAL, "query_embedding": {"model": alias, "dimension": 1536}}, GENERATION)
    assert any("query_embedding.dimension: is 1536" in warning for warning in planned.warnings)


@pytest.mark.parametrize(
    ("asked", "field"), [({"model": "ada", "dimension": 1536}, "dimension"), ({"model": "claude"}, "model")]
)
def test_vectors_from_elsewhere_leave_an_alias_nothing_to_overlook(asked: dict[str, Any], field: str) -> None:
    """The length, and that one name stands for both purposes, are the grid's to settle only for its own."""
    step = {**RETRIEVAL, "query_embedding": asked}
    assert plan(step, GENERATION).warnings
    error = refused(InvalidRequest, step, GENERATION, source=replace(SOURCE, type="pinecone"))
    assert error.param == f"pipeline.steps[0].query_embedding.{field}"


def test_a_source_that_does_not_know_its_length_yet_contradicts_nobody() -> None:
    asked = {"model": "minilm", "dimension": 1536}
    assert plan({**RETRIEVAL, "query_embedding": asked}, source=replace(SOURCE, dimension=0)).warnings == ()


def test_retrieval_asks_with_the_last_words_of_the_user() -> None:
    turns = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "last"},
    ]
    planned = plan(
        {**RETRIEVAL, "top_k": 2, "on_failure": "skip"}, GENERATION, call={"input": None, "messages": turns}
    )
    (retrieval,) = planned.retrievals
    assert (retrieval.query, retrieval.top_k, retrieval.skip_on_failure) == ("last", 2, True)
    assert planned.generation is not None
    assert planned.generation.uses == {"find"}


def test_a_pipeline_that_only_retrieves() -> None:
    planned = plan(RETRIEVAL, execution_hints={"min_gpu_memory_mb": 1})
    assert planned.generation is None
    assert planned.model == ""
    assert planned.warnings == ("execution_hints: has no effect, as no step generates",)


# --- warnings and residency -----------------------------------------------------------------------


def test_what_the_cell_cannot_act_on_is_said() -> None:
    (warning,) = plan(GENERATION, cache_strategy={"type": "semantic"}).warnings
    assert "cache" in warning
    (warning,) = plan(RETRIEVAL, {**GENERATION, "uses": []}).warnings
    assert "no step uses what 'find' finds" in warning


def test_residency_reaches_placement_and_sources() -> None:
    planned = plan(RETRIEVAL, GENERATION, residency=parse_rule("DE"))
    assert planned.generation is not None
    assert "eu-central-1" in planned.generation.placement.allowed_regions
    assert planned.allowed_regions == planned.generation.placement.allowed_regions
    error = refused(Forbidden, RETRIEVAL, GENERATION, residency=parse_rule("US"))
    assert error.param == "pipeline.steps[0].source"


@pytest.mark.parametrize(
    "steps",
    [
        [{**GENERATION, "system_prompt": "region:US"}],
        [{**RETRIEVAL, "filter": {"region": "US"}}, GENERATION],
        [{**RETRIEVAL, "filter": {"region": ["DE", "US"]}}, GENERATION],
        [{**RETRIEVAL, "filter": {"region": " US "}}, GENERATION],
    ],
)
def test_marks_in_the_contract_are_seen(steps: list[dict[str, Any]]) -> None:
    refused(Forbidden, *steps, residency=parse_rule("EU"))


def test_marks_in_the_call_are_seen() -> None:
    refused(Forbidden, GENERATION, call={"input": "for region:US"}, residency=parse_rule("EU"))
    refused(
        Forbidden,
        GENERATION,
        call={"input": "{{a}}", "variables": {"a": "region:US"}},
        residency=parse_rule("EU"),
    )


def test_a_chat_is_a_plan_without_a_pipeline() -> None:
    planned = plan_chat(
        GenerationStep(model="claude", max_output_tokens=3),
        [ChatMessage(role="system", content="s"), ChatMessage(role="user", content="u")],
        request_id="req_2",
        tenant=TENANT,
        config=CONFIG,
    )
    assert (planned.pipeline_id, planned.revision, planned.model) == ("", 0, "chat-8b")
    assert messages(planned) == (Message("system", "s"), Message("user", "u"))
    with pytest.raises(NotFound) as error:
        plan_chat(
            GenerationStep(model="nobody"),
            [ChatMessage(role="user", content="u")],
            request_id="req_3",
            tenant=TENANT,
            config=CONFIG,
        )
    assert error.value.param == "model"


def test_an_alias_of_the_source_s_own_model_is_that_model() -> None:
    source = replace(SOURCE, embedding_model="strict-ada")
    asked = {**RETRIEVAL, "query_embedding": {"model": "minilm", "dimension": 384}}
    assert plan(asked, GENERATION, source=source).warnings == ()
