"""From a contract and a call to what a run will do: typed, complete, checked. Pure.

Everything a caller can be told before work begins is found here: unknown models, a data source that was
embedded otherwise, missing variables, residency. What the cell can't act on becomes a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gateway.pipeline.contract import (
    Contract,
    ExecutionHints,
    FilterValue,
    GenerationStep,
    RetrievalStep,
    StreamControl,
)
from gateway.pipeline.invocation import ChatMessage, Invocation, overridden
from gateway.pipeline.resolution import check_query_embedding, served
from gateway.pipeline.variables import Variables
from gateway.records import DataSourceRecord, Tenant
from gateway.trust.residency import ANYWHERE, Residency, check_marks, texts_within
from grid.config import Config
from grid.errors import Forbidden, InvalidRequest, NotFound
from grid.words import Message, PlacementRequest, Sampling, Task

BYTES_PER_TOKEN = 4
"""Of UTF-8, for English in the usual vocabularies; other scripts have more bytes a character and more
tokens as well. Only placement uses the estimate: the unit counts."""
TOKENS_PER_MESSAGE = 5
"""What a chat template adds to each turn."""


@dataclass(frozen=True, slots=True)
class RetrievalPlan:
    step_id: str
    uses: frozenset[str]
    """Steps that end before it begins."""
    source: DataSourceRecord
    query: str
    """The user's last words; what a generation step wrote takes its place where the step uses one."""
    top_k: int
    filter: dict[str, FilterValue]
    min_score: float | None
    skip_on_failure: bool


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    step_id: str
    uses: frozenset[str]
    """Steps that end before it begins, and whose documents and outputs its prompt holds."""
    model: str
    """That the step's name resolved to."""
    placement: PlacementRequest
    """Of the first attempt; the prompt's estimate is without what other steps add, the deadline is filled in
    later."""
    messages: tuple[Message, ...]
    sampling: Sampling
    stops: tuple[str, ...]
    hints: ExecutionHints
    stream_control: StreamControl


StepPlan = RetrievalPlan | GenerationPlan


@dataclass(frozen=True, slots=True)
class Plan:
    request_id: str
    pipeline_id: str
    revision: int
    tenant: Tenant
    steps: tuple[StepPlan, ...]
    """Each uses only steps before it."""
    allowed_regions: tuple[str, ...]
    """Residency; empty means anywhere."""
    time_limit_s: float
    """From the start of the run to its end."""
    warnings: tuple[str, ...]

    @property
    def step_ids(self) -> tuple[str, ...]:
        return tuple(step.step_id for step in self.steps)

    @property
    def retrievals(self) -> tuple[RetrievalPlan, ...]:
        return tuple(step for step in self.steps if isinstance(step, RetrievalPlan))

    @property
    def generation(self) -> GenerationPlan | None:
        """The step that answers: the last one; None for a pipeline that only retrieves."""
        last = self.steps[-1]
        return last if isinstance(last, GenerationPlan) else None

    @property
    def earlier(self) -> tuple[StepPlan, ...]:
        """All steps but the one that answers."""
        return self.steps if self.generation is None else self.steps[:-1]

    @property
    def model(self) -> str:
        """That of the step that answers; "" where none generates."""
        return self.generation.model if self.generation is not None else ""


def plan_invocation(
    contract: Contract,
    invocation: Invocation | None,
    *,
    request_id: str,
    pipeline_id: str,
    revision: int,
    tenant: Tenant,
    config: Config,
    sources: Mapping[str, DataSourceRecord],
    residency: Residency = ANYWHERE,
) -> Plan:
    """Plan one call of a pipeline. `sources` holds the data source of every retrieval step, by step id.

    Without an `invocation` there is nothing to run: the plan's prompts lack the input, and placeholders stay.
    Raises InvalidRequest naming the field, and Forbidden where residency or a location mark is against it.
    """
    assert invocation is None or invocation.inputs is None, "each input has a plan of its own"
    uses = contract.pipeline.uses
    warnings = _unserved(contract, uses)
    call = invocation if invocation is not None else Invocation.model_construct()
    values = Variables(call.variables)
    fill = values.filled if invocation is not None else str
    prompts = {step.id: fill(step.system_prompt) for step in contract.pipeline.generations}
    conversation = _conversation(call, values)
    values.check_all_used()
    check_marks(residency, _texts(prompts.values(), conversation, contract))
    steps: list[StepPlan] = []
    for index, step in enumerate(contract.pipeline.steps):
        param, step_id = f"pipeline.steps[{index}]", step.id or ""
        if isinstance(step, RetrievalStep):
            steps.append(
                _retrieval(
                    step, param, uses[step_id], sources[step_id], conversation, config, residency, warnings
                )
            )
        else:
            steps.append(
                _generation(
                    step,
                    _with_system(prompts[step.id], conversation),
                    overridden(contract.execution_hints, call.execution_hints),
                    overridden(contract.stream_control, call.stream_control),
                    uses=uses[step_id],
                    model=served(step.model, config, Task.GENERATE, f"{param}.model"),
                    request_id=request_id,
                    pipeline_id=pipeline_id,
                    tenant=tenant,
                    residency=residency,
                )
            )
    return Plan(
        request_id=request_id,
        pipeline_id=pipeline_id,
        revision=revision,
        tenant=tenant,
        steps=tuple(steps),
        allowed_regions=residency.allowed_regions,
        time_limit_s=config.gateway.default_deadline_s,
        warnings=tuple(warnings),
    )


def streams(contract: Contract, invocation: Invocation) -> bool:
    """Say whether a call wants its answer streamed: as it says itself, else as the contract does."""
    answering = contract.pipeline.generation
    wanted = invocation.stream if invocation.stream is not None else answering and answering.stream
    return wanted is not False


def plan_chat(
    step: GenerationStep,
    messages: Sequence[ChatMessage],
    *,
    request_id: str,
    tenant: Tenant,
    config: Config,
    residency: Residency = ANYWHERE,
) -> Plan:
    """Plan a conversation with a model, without a stored pipeline.

    Raises NotFound (param `model`) for a model that the cell doesn't have, and Forbidden as above.
    """
    try:
        model = served(step.model, config, Task.GENERATE, "model")
    except InvalidRequest as unknown:
        raise NotFound(unknown.message, param="model") from None
    conversation = tuple(Message(message.role, message.content) for message in messages)
    check_marks(residency, (message.text for message in conversation))
    answer = _generation(
        step,
        _with_system(step.system_prompt, conversation),
        ExecutionHints(),
        StreamControl(),
        uses=frozenset(),
        model=model,
        request_id=request_id,
        pipeline_id="",
        tenant=tenant,
        residency=residency,
    )
    return Plan(
        request_id=request_id,
        pipeline_id="",
        revision=0,
        tenant=tenant,
        steps=(answer,),
        allowed_regions=residency.allowed_regions,
        time_limit_s=config.gateway.default_deadline_s,
        warnings=(),
    )


def prompt_estimate(messages: Sequence[Message]) -> int:
    """Return about how many tokens a conversation has as a prompt."""
    return sum(estimated_tokens(message.text) + TOKENS_PER_MESSAGE for message in messages)


def estimated_tokens(text: str) -> int:
    """Return about how many tokens `text` has."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
    return size // BYTES_PER_TOKEN + 1


def _retrieval(
    step: RetrievalStep,
    param: str,
    uses: frozenset[str],
    source: DataSourceRecord,
    conversation: Sequence[Message],
    config: Config,
    residency: Residency,
    warnings: list[str],
) -> RetrievalPlan:
    if not residency.allows(source.region):
        field = "data_source_id" if step.data_source_id is not None else "source"
        raise Forbidden(
            f"{param}.{field}: the data source is stored in {source.region!r}, outside {residency.rule!r}",
            param=f"{param}.{field}",
        )
    if step.query_embedding is not None:
        warnings += check_query_embedding(step.query_embedding, f"{param}.query_embedding", source, config)
    return RetrievalPlan(
        step_id=step.id or "",
        uses=uses,
        source=source,
        query=next((message.text for message in reversed(conversation) if message.role == "user"), ""),
        top_k=step.top_k,
        filter=step.filter,
        min_score=step.min_score,
        skip_on_failure=step.on_failure == "skip",
    )


def _unserved(contract: Contract, uses: Mapping[str, frozenset[str]]) -> list[str]:
    """Return a warning for each part of the contract that this cell can't act on."""
    warnings = []
    if contract.cache_strategy.type != "none":
        warnings.append(
            f"cache_strategy: {contract.cache_strategy.type!r} has no effect, as no cache is configured in "
            "this cell; every answer is computed"
        )
    generation = contract.pipeline.generation
    if generation is None:
        warnings += [
            f"{name}: has no effect, as no step generates"
            for name in ("execution_hints", "stream_control")
            if name in contract.model_fields_set
        ]
    else:
        used = frozenset[str]().union(*uses.values())
        warnings += [
            f"pipeline.steps[{index}]: no step uses what {step.id!r} finds"
            for index, step in enumerate(contract.pipeline.steps[:-1])
            if step.id not in used
        ]
    return warnings


# --- text ---------------------------------------------------------------------------------------


def _conversation(call: Invocation, values: Variables) -> tuple[Message, ...]:
    if call.messages is not None:
        return tuple(Message(message.role, message.content) for message in call.messages)
    if call.input is None:
        return ()
    return (Message("user", values.filled(call.input) if values.given else call.input),)


def _with_system(system_prompt: str, conversation: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the conversation under one system message: the pipeline's own prompt, then the caller's."""
    leading = 0
    while leading < len(conversation) and conversation[leading].role == "system":
        leading += 1
    parts = [system_prompt, *(message.text for message in conversation[:leading])]
    text = "\n\n".join(part for part in parts if part)
    rest = conversation[leading:]
    return (Message("system", text), *rest) if text else rest


def _texts(prompts: Iterable[str], conversation: Sequence[Message], contract: Contract) -> Iterator[str]:
    """Yield all that may carry a location mark; a filter's condition is one as `name:word`."""
    yield from prompts
    for message in conversation:
        yield message.text
    for step in contract.pipeline.retrievals:
        yield from texts_within(step.filter)


def _generation(
    step: GenerationStep,
    messages: tuple[Message, ...],
    hints: ExecutionHints,
    stream_control: StreamControl,
    *,
    uses: frozenset[str],
    model: str,
    request_id: str,
    pipeline_id: str,
    tenant: Tenant,
    residency: Residency,
) -> GenerationPlan:
    step_id = step.id or "generation-1"
    return GenerationPlan(
        step_id=step_id,
        uses=uses,
        model=model,
        placement=PlacementRequest(
            request_id=request_id,
            step_id=step_id,
            attempt=1,
            tenant_id=tenant.tenant_id,
            task=int(Task.GENERATE),
            model=step.model,
            prompt_tokens=prompt_estimate(messages),
            max_output_tokens=step.max_output_tokens,
            allowed_regions=residency.allowed_regions,
            prefer_regions=hints.prefer_region,
            avoid_models=hints.avoid_models,
            min_memory_mb=hints.min_gpu_memory_mb,
            lowest_precision=hints.lowest_precision,
            pipeline_id=pipeline_id,
        ),
        messages=messages,
        sampling=Sampling(
            max_output_tokens=step.max_output_tokens,
            temperature=step.temperature,
            top_p=step.top_p,
            top_k=step.top_k,
            seed=step.seed,
            frequency_penalty=step.frequency_penalty,
            presence_penalty=step.presence_penalty,
        ),
        stops=step.stop,
        hints=hints,
        stream_control=stream_control,
    )
