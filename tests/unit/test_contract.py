"""What a contract may say, and how each mistake is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.pipeline.contract import (
    MAX_GENERATION_STEPS,
    MAX_STEPS,
    Contract,
    ExecutionHints,
    StreamControl,
    parse,
)
from gateway.pipeline.invocation import MAX_INPUTS, Invocation, OneShot, overridden
from grid.errors import InvalidRequest

GENERATION = {"type": "generation", "model": "m"}
RETRIEVAL = {"type": "retrieval", "source": "kb"}


def contract(*steps: dict[str, Any], **rest: Any) -> Contract:
    return parse(Contract, json.dumps({"pipeline": {"steps": steps}, **rest}).encode())


def refused(body: bytes | dict[str, Any], model: Any = Contract) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        parse(model, body if isinstance(body, bytes) else json.dumps(body).encode())
    return error.value


def step_refused(step: dict[str, Any]) -> InvalidRequest:
    return refused({"pipeline": {"steps": [step]}})


@pytest.mark.parametrize(
    ("step", "param", "told"),
    [
        ({**RETRIEVAL, "top_k": 101}, "top_k", "at most 100; got 101"),
        ({**RETRIEVAL, "top_k": 0}, "top_k", "at least 1; got 0"),
        ({**RETRIEVAL, "top_k": "3"}, "top_k", "a whole number; got text"),
        ({**RETRIEVAL, "topk": 3}, "topk", "did you mean `top_k`"),
        ({**RETRIEVAL, "data_source_id": "ds-1"}, "data_source_id", "`data_source_id` or by `source`"),
        ({"type": "retrieval"}, "data_source_id", "`data_source_id` or by `source`"),
        ({**RETRIEVAL, "filter": []}, "filter", "object"),
        ({**RETRIEVAL, "filter": {"a": {"near": 1}}}, "filter.a.near", "gte"),
        ({**RETRIEVAL, "query_embedding": {"model": "e", "dim": 3}}, "query_embedding.dim", "dimension"),
        (
            {**RETRIEVAL, "query_embedding": {"model": "e", "dimension": 0}},
            "query_embedding.dimension",
            "at least 1",
        ),
        ({"type": "rerank"}, "type", "unsupported step type 'rerank'; supported: retrieval, generation"),
        ({"model": "m"}, "type", "supported: retrieval, generation"),
        ({"type": "generation"}, "model", "missing"),
        ({**GENERATION, "temperature": 2.5}, "temperature", "at most 2.0; got 2.5"),
        ({**GENERATION, "temperature": True}, "temperature", "a number; got true"),
        ({**GENERATION, "top_p": 0}, "top_p", "greater than 0.0; got 0"),
        ({**GENERATION, "max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({**GENERATION, "max_output_tokens": None}, "max_output_tokens", "a whole number; got null"),
        ({**GENERATION, "seed": 2**63}, "seed", "at most"),
        ({**GENERATION, "stop": ["x"] * 9}, "stop", "at most 8 items; got 9"),
        ({**GENERATION, "stop": ["x", ""]}, "stop[1]", "at least 1 character; got 0"),
        ({**GENERATION, "id": "a b"}, "id", "must match"),
        ({**GENERATION, "uses": ["nobody"]}, "uses[0]", "'nobody' is the id of no step"),
    ],
)
def test_a_wrong_step_is_told_by_its_field(step: dict[str, Any], param: str, told: str) -> None:
    error = step_refused(step)
    assert error.param == f"pipeline.steps[0].{param}"
    assert error.message.startswith(f"{error.param}: ")
    assert told in error.message
    assert "errors" not in error.details, "one fault is told once"


def test_faults_outside_of_steps() -> None:
    assert refused({"pipeline": {"steps": []}}).param == "pipeline.steps"
    assert refused({"pipeline": {"steps": [GENERATION] * (MAX_STEPS + 1)}}).param == "pipeline.steps"
    assert refused({"pipeline": {"steps": [GENERATION]}, "name": ""}).param == "name"
    error = refused({"pipeline": {"steps": [GENERATION]}, "execution_hints": {"quantization": "int3"}})
    assert error.param == "execution_hints.quantization"
    assert "int4, int8, fp8, fp16, bf16, fp32; got 'int3'" in error.message


def test_an_unknown_field_comes_before_what_it_left_missing() -> None:
    error = refused({"pipelin": {"steps": [GENERATION]}})
    assert error.param == "pipelin"
    assert "did you mean `pipeline`" in error.message
    assert [fault["param"] for fault in error.details["errors"]] == ["pipelin", "pipeline"]


@pytest.mark.parametrize("body", [b"", b"{", b'{"pipeline": }', b"\xff", b'{"a": "\\ud800"}', b"[" * 10_000])
def test_malformed_json_is_told_by_line_and_column(body: bytes) -> None:
    error = refused(body)
    assert error.param == ""
    assert "not valid JSON" in error.message
    assert "line 1 column" in error.message


def test_a_body_that_is_no_object() -> None:
    assert refused(b"[]").message == "must be an object; got a list"


def test_numbers_that_are_none_are_refused() -> None:
    error = refused(b'{"pipeline":{"steps":[{"type":"generation","model":"m","temperature":NaN}]}}')
    assert error.param == "pipeline.steps[0].temperature"


def test_texts_are_never_quoted_back() -> None:
    secret = "sk-very-secret"
    for step in ({**RETRIEVAL, "top_k": secret}, {**GENERATION, "model": 5, "system_prompt": [secret]}):
        error = step_refused(step)
        assert secret not in error.message + json.dumps(error.details)


def test_steps_get_ids_by_position() -> None:
    steps = contract(RETRIEVAL, {**RETRIEVAL, "id": "second"}, GENERATION).pipeline.steps
    assert [step.id for step in steps] == ["retrieval-1", "second", "generation-3"]


def test_ids_are_unique_and_uses_names_earlier_steps() -> None:
    wired = contract({**RETRIEVAL, "id": "a"}, {**GENERATION, "uses": ["a"]})
    assert wired.pipeline.steps[1].uses == ("a",)
    twice = refused({"pipeline": {"steps": [{**RETRIEVAL, "id": "a"}, {**GENERATION, "id": "a"}]}})
    assert twice.param == "pipeline.steps[1].id"


@pytest.mark.parametrize(
    ("uses", "place", "told"),
    [
        (["b"], 0, "this step itself"),
        (["a", "c"], 1, "comes later"),
        (["zz"], 0, "is the id of no step (before this one: a)"),
        (["a", "a"], 1, "named twice"),
    ],
)
def test_uses_that_name_no_earlier_step_once(uses: list[str], place: int, told: str) -> None:
    steps = [{**RETRIEVAL, "id": "a"}, {**RETRIEVAL, "id": "b", "uses": uses}, {**RETRIEVAL, "id": "c"}]
    error = refused({"pipeline": {"steps": steps}})
    assert error.param == f"pipeline.steps[1].uses[{place}]"
    assert told in error.message


def test_a_step_uses_all_before_it_unless_it_says() -> None:
    steps = [{**RETRIEVAL, "id": "a"}, {**RETRIEVAL, "id": "b", "uses": []}, {**GENERATION, "id": "c"}]
    assert contract(*steps).pipeline.uses == {"a": frozenset(), "b": frozenset(), "c": {"a", "b"}}


def test_a_generation_answers_last_and_earlier_ones_are_used() -> None:
    last = refused({"pipeline": {"steps": [GENERATION, RETRIEVAL]}})
    assert last.param == "pipeline.steps[1]"
    draft, unused = {**GENERATION, "id": "draft"}, {**GENERATION, "uses": []}
    wasted = refused({"pipeline": {"steps": [draft, unused]}})
    assert (wasted.param, "'draft'" in wasted.message) == ("pipeline.steps[0]", True)
    many = refused({"pipeline": {"steps": [GENERATION] * (MAX_GENERATION_STEPS + 1)}})
    assert many.param == f"pipeline.steps[{MAX_GENERATION_STEPS}]"
    assert len(contract(*[GENERATION] * MAX_GENERATION_STEPS).pipeline.generations) == MAX_GENERATION_STEPS
    assert contract(RETRIEVAL).pipeline.generation is None


def test_text_hygiene() -> None:
    parsed = contract({**GENERATION, "system_prompt": "\r\n  Be kind.\r\nBe brief.\r \n", "stop": "\r\n"})
    generation = parsed.pipeline.generation
    assert generation is not None
    assert generation.system_prompt == "Be kind.\nBe brief."
    assert generation.stop == ("\r\n",), "a stop string is no prompt: it means what it says"
    invocation = parse(Invocation, b'{"input": " a\\r\\nb\\rc ", "variables": {"v": "x\\r\\ny"}}')
    assert invocation.input == " a\nb\nc "
    assert invocation.variables == {"v": "x\ny"}
    turns = parse(
        Invocation,
        b'{"messages": [{"role": "system", "content": " s "}, {"role": "user", "content": " u "}]}',
    )
    assert turns.messages is not None
    assert [message.content for message in turns.messages] == ["s", " u "]


def test_contracts_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        contract(GENERATION).name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({}, "input", "missing"),
        ({"input": ""}, "input", "at least 1 character"),
        ({"input": 5}, "input", "text; got 5"),
        ({"input": [{"role": "user", "content": "b"}]}, "input", "goes in `messages`"),
        ({"inputs": []}, "inputs", "at least 1 item"),
        ({"inputs": "a"}, "inputs", "a list; got text"),
        ({"inputs": ["a", ""]}, "inputs[1]", "at least 1 character"),
        ({"inputs": [5]}, "inputs[0]", "text; got 5"),
        ({"inputs": [[{"role": "user", "contnt": "b"}]]}, "inputs[0][0].contnt", "`content`"),
        ({"inputs": [[{"role": "assistant", "content": "b"}]]}, "inputs[0]", "must be the user's"),
        ({"inputs": ["a"], "input": "b"}, "inputs", "`input` or `inputs`, not both"),
        ({"inputs": ["a"] * (MAX_INPUTS + 1)}, "inputs", f"at most {MAX_INPUTS} items"),
        ({"input": "a", "messages": [{"role": "user", "content": "b"}]}, "messages", "not both"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "tool", "content": "b"}]}, "messages[0].role", "system, user, assistant"),
        ({"messages": [{"role": "assistant", "content": "b"}]}, "messages", "must be the user's"),
        ({"input": "a", "variables": {"a b": 1}}, "variables", "no variable name"),
        ({"input": "a", "variables": {"a": [1]}}, "variables", "text, a number, true or false"),
        ({"input": "a", "stream": "no"}, "stream", "true or false; got text"),
        (
            {"input": "a", "stream_control": {"max_latency": 1}},
            "stream_control.max_latency",
            "`max_latency_ms`",
        ),
        ({"input": "a", "modle": 1}, "modle", "unknown field"),
    ],
)
def test_a_wrong_call_is_told_by_its_field(body: dict[str, Any], param: str, told: str) -> None:
    error = refused(body, Invocation)
    assert error.param == param
    assert told in error.message


def test_each_input_is_a_call_of_its_own() -> None:
    turns = [{"role": "user", "content": "Hi"}]
    body = {"inputs": ["a", turns], "variables": {"v": 1}, "stream": False}
    text, chat = parse(Invocation, json.dumps(body).encode()).each()
    rest = {"variables": {"v": 1}, "stream": False}
    assert text == parse(Invocation, json.dumps({"input": "a", **rest}).encode())
    assert chat == parse(Invocation, json.dumps({"messages": turns, **rest}).encode())


def test_variables_become_text() -> None:
    body = {"input": "x", "variables": {"t": "text", "i": 3, "f": 0.5, "yes": True, "no": False}}
    invocation = parse(Invocation, json.dumps(body).encode())
    assert invocation.variables == {"t": "text", "i": "3", "f": "0.5", "yes": "true", "no": "false"}


def test_overrides_replace_field_by_field() -> None:
    base = StreamControl(min_tokens_per_chunk=16, max_latency_ms=500)
    assert overridden(base, None) == base
    assert overridden(base, StreamControl(max_latency_ms=100)) == StreamControl(
        min_tokens_per_chunk=16, max_latency_ms=100
    )
    hints = ExecutionHints(min_gpu_memory_mb=9, prefer_region=("a",))
    assert overridden(hints, ExecutionHints(prefer_region=())).prefer_region == ()
    assert overridden(hints, ExecutionHints(prefer_region=())).min_gpu_memory_mb == 9


def test_a_one_shot_body_is_a_contract_and_a_call() -> None:
    body = {
        "pipeline": {"steps": [GENERATION]},
        "cache_strategy": {"type": "exact"},
        "input": "Hi",
        "stream": False,
    }
    both = parse(OneShot, json.dumps(body).encode())
    assert both.contract.pipeline.generation is not None
    assert both.contract.cache_strategy.type == "exact"
    assert both.invocation is not None
    assert (both.invocation.input, both.invocation.stream) == ("Hi", False)
    assert both.contract.model_fields_set == {"pipeline", "cache_strategy"}


@pytest.mark.parametrize(
    "body",
    [
        b'{"input": "x", ' + b",".join(b'"k%d": 1' % n for n in range(100_000)) + b"}",
        b'{"messages": [' + b",".join([b"1"] * 400_000) + b"]}",
        b'{"input": "x", "variables": {"deep": [' + b",".join([b"{}"] * 300_000) + b"]}}",
    ],
    ids=["unknown fields", "faulty items", "nested"],
)
def test_a_body_full_of_faults_is_refused_without_listing_them(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(Invocation, body)
    assert len(refused.value.details.get("errors", ())) <= 8
    assert len(refused.value.message) < 300


def test_a_list_stops_at_its_first_fault() -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(Invocation, b'{"messages": [' + b",".join([b"1"] * 1_500) + b"]}")
    assert refused.value.param.startswith("messages")
    assert "errors" not in refused.value.details


def test_long_names_are_not_quoted_back() -> None:
    name = "n" * 100_000
    for body in (
        {"input": "x", name: 1},
        {"input": "x", "variables": {f"{name}-": 1}},
        {"input": "x", "stream": name},
    ):
        with pytest.raises(InvalidRequest) as refused:
            parse(Invocation, json.dumps(body).encode())
        assert len(refused.value.message) < 500
        assert len(refused.value.param) < 100
