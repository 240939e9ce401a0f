"""The contract: what a caller may declare, as frozen typed objects. Parsed once, here, at the edge.

A contract is data; it names steps and never says how to run them. What a call brings to it is parsed in
`invocation.py`. Text hygiene happens while parsing, so nothing later counts, hashes or tokenises text that
was not cleaned. Errors become `InvalidRequest` in `refusals.py`; `parse` is the one door.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from gateway.knowledge.filters import parse_filter
from gateway.pipeline.refusals import check_size, misfit, refusal
from grid.errors import InvalidRequest
from grid.words import Precision

MAX_STEPS = 16
"""More steps than any pipeline seen; bounds the work that one call can ask for."""
MAX_GENERATION_STEPS = 8
"""Each may hold a slot of its own, and its whole answer is kept for the steps that use it."""
MAX_NAME_CHARS = 128
"""Names and ids end up in Redis keys, URLs and log lines."""
MAX_DESCRIPTION_CHARS = 2_000
"""A description is for people; it is stored with every revision."""
MAX_TEXT_CHARS = 2_000_000
"""About 500,000 tokens, beyond every served context: a longer prompt is refused by its unit with the
counts, and this bound only keeps absurd ones off the link."""
MAX_OUTPUT_TOKENS = 131_072
"""The longest answer that a served model family can produce."""
DEFAULT_OUTPUT_TOKENS = 512
"""A full answer of a chat model, and still room for a prompt in the smallest context that is served."""
DEFAULT_TEMPERATURE = 1.0
"""The model's own distribution, as the compatible routes and vLLM have it."""
MAX_TEMPERATURE = 2.0
"""Above it text is noise; the bound that compatible clients know."""
MAX_PENALTY = 2.0
"""The bound that compatible clients know."""
MAX_SAMPLING_TOP_K = 1_048_576
"""Above every vocabulary; more would mean "no limit", which is 0."""
MAX_SEED = 2**63 - 1
"""A signed 64-bit integer, what engines take."""
MAX_STOPS = 8
"""Each is searched in every piece of text."""
MAX_STOP_CHARS = 256
"""Bounds the text that is held back because it could begin a stop string."""
MAX_TOP_K = 100
"""Documents of one retrieval; more never fit a prompt."""
DEFAULT_TOP_K = 5
MAX_DIMENSION = 65_536
"""The largest vector that the stores take."""
MAX_REGIONS = 16
"""Preferred regions are an order for one request, not a fleet map."""
MAX_AVOIDED_MODELS = 64
MAX_MEMORY_MB = 100_000_000
"""100 TB: above any node, below anything that would overflow."""
MAX_TOKENS_PER_CHUNK = 4_096
"""Held tokens stay in the gateway's memory."""
MAX_CHUNK_LATENCY_MS = 60_000
"""A client that waits longer has lost its stream to some proxy."""
DEFAULT_CHUNK_LATENCY_MS = 200
"""Where only a minimum is given: below what readers notice as a stall."""
MAX_TTL_SECONDS = 30 * 24 * 3_600
"""A cached answer older than a month is stale for every use seen."""

STEP_ID = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
REGION = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"


def clean_text(text: str) -> str:
    """Return `text` with `\\r\\n` and `\\r` as `\\n`."""
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def clean_system_prompt(text: str) -> str:
    """Return `text` cleaned and without outer blank space."""
    return clean_text(text).strip()


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


FilterScalar = str | int | float | bool
FilterValue = FilterScalar | tuple[FilterScalar, ...] | dict[str, float]


def _filter(value: Any) -> dict[str, FilterValue]:
    """Take what every store can match; `gateway.knowledge.filters` says what that is."""
    try:
        parse_filter(value)
    except InvalidRequest as wrong:
        below = wrong.param.removeprefix("filter").removeprefix(".")
        raise misfit((below,) if below else (), wrong.message) from None
    return {key: tuple(given) if isinstance(given, list) else given for key, given in value.items()}


Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
StepId = Annotated[str, Field(pattern=STEP_ID)]
RegionName = Annotated[str, Field(pattern=REGION)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARS), AfterValidator(clean_text)]
SystemPrompt = Annotated[str, Field(max_length=MAX_TEXT_CHARS), AfterValidator(clean_system_prompt)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_STOP_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
Stops = Annotated[
    tuple[Stop, ...],
    Field(max_length=MAX_STOPS, strict=False, fail_fast=True),
    BeforeValidator(_one_or_many),
    WithJsonSchema(
        {"anyOf": [_STOP_SCHEMA, {"type": "array", "items": _STOP_SCHEMA, "maxItems": MAX_STOPS}]}
    ),
]
"""One string stands for a list of one."""


class Part(BaseModel):
    """Base of every part of a contract: frozen, strict about types, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class QueryEmbedding(Part):
    model: Name
    dimension: int | None = Field(None, ge=1, le=MAX_DIMENSION)
    """None: the model's own."""


class RetrievalStep(Part):
    type: Literal["retrieval"] = "retrieval"
    id: StepId | None = None
    """Filled in as `retrieval-N` (N: position from 1) where the caller gave none."""
    uses: tuple[StepId, ...] | None = Field(None, max_length=MAX_STEPS, strict=False, fail_fast=True)
    """Ids of earlier steps that it waits for; None: all earlier steps. Where generation steps are among them,
    the query is what the last of these wrote; else it is the user's last words."""
    data_source_id: Name | None = None
    source: Name | None = None
    """The data source's name; exactly one of the two is given."""
    query_embedding: QueryEmbedding | None = None
    """None: the embedding model that the data source was filled with."""
    top_k: int = Field(DEFAULT_TOP_K, ge=1, le=MAX_TOP_K)
    filter: Annotated[dict[str, FilterValue], BeforeValidator(_filter)] = {}
    """All conditions must hold. A list means any of its values; `{"gte": 1, "lt": 5}` a range."""
    min_score: float | None = Field(None, ge=-1.0, le=1.0)
    """Least cosine similarity."""
    on_failure: Literal["fail", "skip"] = "fail"

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.data_source_id is None) == (self.source is None):
            raise misfit(
                ("data_source_id",),
                "a retrieval step names its data source by `data_source_id` or by `source`: one",
            )
        return self


class GenerationStep(Part):
    type: Literal["generation"] = "generation"
    id: StepId | None = None
    uses: tuple[StepId, ...] | None = Field(None, max_length=MAX_STEPS, strict=False, fail_fast=True)
    """Ids of the earlier steps whose documents and outputs the prompt holds; None: all earlier steps."""
    model: Name
    """A model of the cell or one of its aliases."""
    system_prompt: SystemPrompt = ""
    max_output_tokens: int = Field(DEFAULT_OUTPUT_TOKENS, ge=1, le=MAX_OUTPUT_TOKENS)
    temperature: float = Field(DEFAULT_TEMPERATURE, ge=0.0, le=MAX_TEMPERATURE)
    """0 is greedy: the most likely token each time."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0, le=MAX_SAMPLING_TOP_K)
    """0 means no limit."""
    seed: int | None = Field(None, ge=-MAX_SEED - 1, le=MAX_SEED)
    stop: Stops = ()
    """The answer ends before the first of these; one string stands for a list of one."""
    frequency_penalty: float = Field(0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    presence_penalty: float = Field(0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    stream: bool | None = None
    """How a call is answered that doesn't say so itself; None: streamed."""


Step = Annotated[RetrievalStep | GenerationStep, Field(discriminator="type")]


class Pipeline(Part):
    """Steps in an order in which they could run one by one: a step uses only steps before it, so there are no
    cycles. The last step answers; a pipeline without a generation step answers with its documents."""

    steps: tuple[Step, ...] = Field(min_length=1, max_length=MAX_STEPS, strict=False, fail_fast=True)

    @field_validator("steps", mode="after")
    @classmethod
    def _wired(cls, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        named = tuple(
            step if step.id is not None else step.model_copy(update={"id": f"{step.type}-{position}"})
            for position, step in enumerate(steps, start=1)
        )
        _check_ids(named)
        _check_uses(named)
        _check_generations(named)
        return named

    @property
    def uses(self) -> dict[str, frozenset[str]]:
        """For each step by id the ids of the steps that it uses, in the order of the steps."""
        wiring: dict[str, frozenset[str]] = {}
        for step in self.steps:
            wiring[step.id or ""] = frozenset(wiring if step.uses is None else step.uses)
        return wiring

    @property
    def retrievals(self) -> tuple[RetrievalStep, ...]:
        return tuple(step for step in self.steps if isinstance(step, RetrievalStep))

    @property
    def generations(self) -> tuple[GenerationStep, ...]:
        return tuple(step for step in self.steps if isinstance(step, GenerationStep))

    @property
    def generation(self) -> GenerationStep | None:
        """The step that answers; None where no step generates."""
        last = self.steps[-1]
        return last if isinstance(last, GenerationStep) else None


def _check_ids(steps: tuple[Step, ...]) -> None:
    seen: set[str | None] = set()
    for index, step in enumerate(steps):
        if step.id in seen:
            raise misfit((index, "id"), f"an earlier step has the id {step.id!r}; every step needs its own")
        seen.add(step.id)


def _check_uses(steps: tuple[Step, ...]) -> None:
    ids = [step.id for step in steps]
    for index, step in enumerate(steps):
        for place, used in enumerate(step.uses or ()):
            at = (index, "uses", place)
            if used == step.id:
                raise misfit(at, f"{used!r} is this step itself; a step uses only steps before it")
            if used in ids[index + 1 :]:
                raise misfit(at, f"{used!r} comes later; a step uses only steps before it, so move it up")
            if used not in ids:
                known = ", ".join(str(known) for known in ids[:index]) or "there is none"
                raise misfit(at, f"{used!r} is the id of no step (before this one: {known})")
            if used in (step.uses or ())[:place]:
                raise misfit(at, f"{used!r} is named twice; once is enough")


def _check_generations(steps: tuple[Step, ...]) -> None:
    generating = [index for index, step in enumerate(steps) if isinstance(step, GenerationStep)]
    if not generating:
        return
    if len(generating) > MAX_GENERATION_STEPS:
        raise misfit(
            (generating[MAX_GENERATION_STEPS],),
            f"a pipeline has at most {MAX_GENERATION_STEPS} generation steps",
        )
    if generating[-1] != len(steps) - 1:
        raise misfit(
            (len(steps) - 1,),
            "a pipeline that generates ends with a generation step, whose text is the answer",
        )
    for index in generating[:-1]:
        if not any(step.uses is None or steps[index].id in step.uses for step in steps[index + 1 :]):
            raise misfit(
                (index,),
                f"no later step uses what {steps[index].id!r} writes; name it in a later step's `uses`, or "
                "leave it out",
            )


class ExecutionHints(Part):
    min_gpu_memory_mb: int = Field(0, ge=0, le=MAX_MEMORY_MB)
    """The unit's own memory grant must be at least this."""
    prefer_region: tuple[RegionName, ...] = Field((), max_length=MAX_REGIONS, strict=False, fail_fast=True)
    """Strict priority order; a hint, never a residency rule."""
    avoid_models: tuple[Name, ...] = Field((), max_length=MAX_AVOIDED_MODELS, strict=False, fail_fast=True)
    quantization: Literal["int4", "int8", "fp8", "fp16", "bf16", "fp32"] | None = None
    """The lowest precision that the caller accepts; None: any."""

    @property
    def lowest_precision(self) -> int:
        return 0 if self.quantization is None else int(Precision.parse(self.quantization))


class StreamControl(Part):
    min_tokens_per_chunk: int = Field(1, ge=1, le=MAX_TOKENS_PER_CHUNK)
    max_latency_ms: int = Field(DEFAULT_CHUNK_LATENCY_MS, ge=0, le=MAX_CHUNK_LATENCY_MS)
    """Since the first held token."""
    flush_on_eos: bool = True
    """False: the last tokens, too, wait for one of the two rules above."""


class CacheStrategy(Part):
    type: Literal["none", "exact", "semantic"] = "none"
    similarity_threshold: float = Field(0.85, ge=0.0, le=1.0)
    ttl_seconds: int = Field(3_600, ge=1, le=MAX_TTL_SECONDS)


class Contract(Part):
    """A declared pipeline, as it is stored."""

    name: Name | None = None
    description: str = Field("", max_length=MAX_DESCRIPTION_CHARS)
    pipeline: Pipeline
    execution_hints: ExecutionHints = ExecutionHints()
    stream_control: StreamControl = StreamControl()
    cache_strategy: CacheStrategy = CacheStrategy()


Parsed = TypeVar("Parsed", bound=BaseModel)


def parse(model: type[Parsed], body: bytes) -> Parsed:
    """Return `body` as `model`. Raises InvalidRequest: `param` is the field's path, such as
    `pipeline.steps[0].top_k`; the message says what was given and what to do; `details["errors"]`
    lists further faults of the same body."""
    check_size(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise refusal(model, error) from None
