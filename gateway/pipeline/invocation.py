"""What a call brings to a contract: input, variables, and what it replaces. Parsed as `contract.py` says.

Variables: `{{name}}` in a `system_prompt` always stands for the call's variable of that name. In `input`
it does so only when the call carries `variables`, so that end users may type braces; chat messages are
taken literally. A value is put in as it is and never expanded again. A placeholder without a value, and
a variable that no text uses, are errors that name it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from gateway.pipeline.contract import (
    MAX_TEXT_CHARS,
    Contract,
    ExecutionHints,
    Part,
    StreamControl,
    Text,
    clean_system_prompt,
    clean_text,
)
from gateway.pipeline.refusals import cut, misfit

MAX_MESSAGES = 1_000
"""Longer conversations exceed every served context anyway."""
MAX_INPUTS = 256
"""Of one call: minutes of a small cell's work, with every outcome kept until the last is there."""
MAX_VARIABLES = 64

INPUTS = ("input", "messages", "inputs")
"""The fields that say what to answer; a call has one of them."""
VARIABLE_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")


def _variables(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError('must be an object of values by name, such as {"product": "Acme Router"}')
    if len(value) > MAX_VARIABLES:
        raise ValueError(f"holds at most {MAX_VARIABLES} variables, not {len(value)}")
    texts: dict[str, str] = {}
    for name, given in value.items():
        if not isinstance(name, str) or not VARIABLE_NAME.match(name):
            raise ValueError(
                f"{cut(str(name))!r} is no variable name: letters, digits and _, not starting with a digit"
            )
        if isinstance(given, bool):
            texts[name] = "true" if given else "false"
        elif isinstance(given, int | float):
            texts[name] = str(given)
        elif isinstance(given, str):
            texts[name] = clean_text(given)
        else:
            raise ValueError(f"the value of {cut(name)!r} must be text, a number, true or false")
        if len(texts[name]) > MAX_TEXT_CHARS:
            raise ValueError(f"the value of {cut(name)!r} has more than {MAX_TEXT_CHARS} characters")
    return texts


Values = Annotated[
    dict[str, str],
    BeforeValidator(_variables),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": VARIABLE_NAME.pattern},
            "additionalProperties": {"type": ["string", "number", "boolean"]},
            "maxProperties": MAX_VARIABLES,
        }
    ),
]
"""By name; numbers, true and false become text."""


class ChatMessage(Part):
    role: Literal["system", "user", "assistant"]
    content: Text

    @model_validator(mode="before")
    @classmethod
    def _strip_system(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("role") == "system" and isinstance(data.get("content"), str):
            return {**data, "content": clean_system_prompt(data["content"])}
        return data


def _user_last(turns: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    if turns and turns[-1].role != "user":
        raise ValueError(f"the last message must be the user's, not the {turns[-1].role}'s")
    return turns


def _kind_of_input(given: Any) -> str:
    return "chat" if isinstance(given, list | tuple) else "text"


Conversation = Annotated[
    tuple[ChatMessage, ...],
    Field(min_length=1, max_length=MAX_MESSAGES, strict=False, fail_fast=True),
    AfterValidator(_user_last),
]
"""Turns of which the last is the user's."""
Input = Annotated[
    Annotated[Text, Tag("text")] | Annotated[Conversation, Tag("chat")], Discriminator(_kind_of_input)
]


class Asked(Part):
    """What every call may say: the input, and how it wants the answer."""

    input: Text | None = None
    messages: Conversation | None = None
    """A conversation whose last turn is the user's."""
    inputs: tuple[Input, ...] | None = Field(
        None, min_length=1, max_length=MAX_INPUTS, strict=False, fail_fast=True
    )
    """Texts and conversations, each run by itself; the outcomes come in the same order."""
    variables: Values | None = None
    stream: bool | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _text_alone(cls, value: Any) -> Any:
        if isinstance(value, list):
            raise ValueError("is one text; a conversation goes in `messages`, several inputs in `inputs`")
        return value

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        given = [name for name in INPUTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise misfit((given[1],), f"give `{given[0]}` or `{given[1]}`, not both")
        return self

    @property
    def has_input(self) -> bool:
        return any(getattr(self, name) is not None for name in INPUTS)


class Invocation(Asked):
    """The body of an invoke or dry-run call."""

    execution_hints: ExecutionHints | None = None
    """Fields given here replace the contract's, one by one."""
    stream_control: StreamControl | None = None
    """Fields given here replace the contract's, one by one."""

    @model_validator(mode="after")
    def _some_input(self) -> Self:
        if not self.has_input:
            raise misfit(
                ("input",),
                "is missing: give the text to answer, chat `messages`, or a list `inputs`; "
                "`dry-run` instead of `invoke` says without any what a call would do",
            )
        return self

    def each(self) -> tuple[Invocation, ...]:
        """Return one invocation for each of `inputs`."""
        return tuple(
            self.model_copy(update={"inputs": None, "input" if isinstance(given, str) else "messages": given})
            for given in self.inputs or ()
        )


Made = TypeVar("Made", bound=BaseModel)


def _part_of(whole: BaseModel, made: type[Made], fields: type[BaseModel]) -> Made:
    """Return the `made` that the `fields` of an already validated `whole` give."""
    values = {name: getattr(whole, name) for name in fields.model_fields}
    return made.model_construct(_fields_set=whole.model_fields_set & values.keys(), **values)


class OneShot(Contract, Asked):
    """A contract and, where it should run at once, its input, in one body."""

    @property
    def contract(self) -> Contract:
        return _part_of(self, Contract, Contract)

    @property
    def invocation(self) -> Invocation | None:
        """The call to make; None where there is nothing to run."""
        return _part_of(self, Invocation, Asked) if self.has_input else None


Overridable = TypeVar("Overridable", ExecutionHints, StreamControl)


def overridden(base: Overridable, override: Overridable | None) -> Overridable:
    """Return `base` with the fields that `override` sets itself."""
    if override is None or not override.model_fields_set:
        return base
    return base.model_copy(update={name: getattr(override, name) for name in override.model_fields_set})
