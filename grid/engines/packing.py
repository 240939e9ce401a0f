"""What every text engine does alike around its tokenizer: room for documents, overflow, prompt hash.

Pure, and without heavy imports. Documents are packed best first and whole: the first one without room
ends the packing, so that `documents_used` always means the best so many.
"""

from __future__ import annotations

import array
import hashlib
from collections.abc import Iterable, Sequence

from grid.errors import ContextOverflow, InvalidRequest
from grid.words import Message

ROLES = ("system", "user", "assistant")

CONTEXT_HEADING = "Answer from this context:"
"""Between the system prompt and the documents."""

PROMPT_HASH_BYTES = 16


def heading_block(system: str) -> str:
    """Return what stands between the system prompt and the documents."""
    return f"\n\n{CONTEXT_HEADING}" if system else CONTEXT_HEADING


def document_block(text: str) -> str:
    """Return how a document stands in the system message: by itself, after an empty line."""
    return f"\n\n{text.strip()}"


def arranged(heading: Sequence[int], documents: Sequence[Sequence[int]]) -> list[int]:
    """Return the ids of the context from the packed `documents`, which come best first.

    They are shown in reverse, so that the best one is nearest to the question: small models answer from
    what they have just read (SmolLM2-135M: 13 of 16 help-centre questions right this way, 10 the other).
    """
    return [*heading, *(token for document in reversed(documents) for token in document)]


def split_system(messages: Sequence[Message]) -> tuple[str, tuple[Message, ...]]:
    """Return the leading system text ("" when there is none) and the messages after it.

    Raises InvalidRequest for an unknown role or an empty conversation.
    """
    if not messages:
        raise InvalidRequest("a prompt needs at least one message", param="messages")
    for position, message in enumerate(messages):
        if message.role not in ROLES:
            raise InvalidRequest(
                f"unknown role {message.role!r}; one of {', '.join(ROLES)}",
                param=f"messages[{position}].role",
            )
    if messages[0].role == "system":
        return messages[0].text, tuple(messages[1:])
    return "", tuple(messages)


def fitting(sizes: Iterable[int], room: int) -> int:
    """Return how many of the leading `sizes` fit into `room` together; reads no further than needed."""
    used = 0
    for size in sizes:
        room -= size
        if room < 0:
            break
        used += 1
    return used


def check_room(prompt_tokens: int, max_output_tokens: int, context_tokens: int, *, exact: bool = True) -> int:
    """Return the tokens left for documents; raises ContextOverflow with the counts.

    `exact` is false when `prompt_tokens` is a proven lower bound, from a refusal without tokenising.
    """
    room = context_tokens - max_output_tokens - prompt_tokens
    if room >= 0:
        return room
    count = f"{prompt_tokens}" if exact else f"at least {prompt_tokens}"
    raise ContextOverflow(
        f"the prompt has {count} tokens and asks for {max_output_tokens} more, but the model's context "
        f"holds {context_tokens}; shorten the input or lower max_output_tokens",
        prompt_tokens=prompt_tokens,
        max_output_tokens=max_output_tokens,
        context_tokens=context_tokens,
    )


def prompt_hash(ids: Sequence[int]) -> bytes:
    """Return 16 bytes over the ids; equal for equal prompts on every unit with the same tokenizer."""
    return hashlib.blake2b(array.array("Q", ids).tobytes(), digest_size=PROMPT_HASH_BYTES).digest()
