"""From messages and documents to token ids. Nobody but the model's own template can write a special token.

The template is rendered with marks in place of the contents. What is between the marks is tokenised with
special tokens; each content by itself by a tokenizer that has none, so `<|im_end|>` in a document is
nine characters of text. Blocking and thread-safe; `PromptBuilder.is_long` says what is worth a thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer

from grid.engines.base import Prepared
from grid.engines.packing import (
    arranged,
    check_room,
    document_block,
    fitting,
    heading_block,
    prompt_hash,
    split_system,
)
from grid.errors import InternalError, InvalidRequest
from grid.words import Message

LONG_CHARACTERS = 2_000
"""From here on tokenising takes milliseconds, which an event loop with streams can't spare."""

SHAPES_KEPT = 64
"""Rendered templates by sequence of roles; real traffic has a handful."""

_MARK = re.compile("\ue000(\\d+)\ue001")

Shape = tuple[tuple[int, ...] | int, ...]
"""A rendered template: its own ids and, as plain numbers, the places of the contents."""


class PromptBuilder:
    """A model's chat template and the encoding side of its tokenizer. Built once for each engine."""

    def __init__(self, folder: Path, context_tokens: int) -> None:
        spec: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        spec |= {"truncation": None, "padding": None}
        self._context_tokens = context_tokens
        self._trusted = Tokenizer.from_str(json.dumps(spec))
        self._reserved = {token["id"] for token in spec["added_tokens"] if _is_reserved(token)}
        kept = [token for token in spec["added_tokens"] if not _is_reserved(token)]
        self._plain = Tokenizer.from_str(json.dumps(spec | {"added_tokens": kept}))
        self._byte_level = spec["normalizer"] is None and '"ByteLevel"' in json.dumps(spec["pre_tokenizer"])
        # In a byte-level vocabulary one character stands for one byte.
        self._longest_token_bytes = max(map(len, self._plain.get_vocab()))
        self._template, self._variables = _load_template(folder)
        self._shape: Callable[[tuple[str, ...], bool], Shape] = lru_cache(SHAPES_KEPT)(self._render_shape)

    def is_long(self, messages: Sequence[Message], documents: Sequence[str]) -> bool:
        size = sum(len(message.text) for message in messages) + sum(map(len, documents))
        return size > LONG_CHARACTERS

    def build(
        self, messages: Sequence[Message], documents: Sequence[str], max_output_tokens: int
    ) -> Prepared:
        """Return the prompt with as many whole documents, best first, as leave room for the answer.

        Raises ContextOverflow with the counts when the prompt doesn't fit without any, InvalidRequest
        for roles or an order of them that the model's template refuses.
        """
        at_least = self._fewest_tokens(messages)
        check_room(at_least, max_output_tokens, self._context_tokens, exact=False)
        system, turns = split_system(messages)
        roles = tuple(turn.role for turn in turns)
        contents = [self._encode(system), *(self._encode(turn.text) for turn in turns)]
        shape = self._shape(roles, len(turns) < len(messages))
        check_room(_size(shape, contents), max_output_tokens, self._context_tokens)
        used = 0
        if documents:
            with_system = self._shape(roles, True)
            heading, blocks = self._encode(heading_block(system)), []

            def sizes() -> Iterator[int]:
                for document in documents:
                    blocks.append(self._encode(document_block(document)))
                    yield len(blocks[-1])

            taken = max_output_tokens + _size(with_system, contents) + len(heading)
            used = fitting(sizes(), self._context_tokens - taken)
            if used:
                shape = with_system
                contents[0] += arranged(heading, blocks[:used])
        ids: list[int] = []
        for piece in shape:
            ids += contents[piece] if isinstance(piece, int) else piece
        return Prepared(tuple(ids), prompt_hash(ids), used)

    def _fewest_tokens(self, messages: Sequence[Message]) -> int:
        """Return a proven lower bound on the prompt's tokens, without tokenising: a byte-level token stands
        for no more bytes than the longest has. For other tokenizers (they may normalise, or fuse what they
        don't know) there is no bound but 0."""
        if not self._byte_level:
            return 0
        return sum(len(message.text.encode()) for message in messages) // self._longest_token_bytes

    def _encode(self, text: str) -> list[int]:
        # The batch call is the one that releases the GIL, which matters for long texts in a thread.
        ids: list[int] = self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not self._reserved.isdisjoint(ids):
            raise InvalidRequest("the text contains a control token of the model", param="messages")
        return ids

    def _render_shape(self, roles: tuple[str, ...], with_system: bool) -> Shape:
        """Content 0 is the system message, content 1 the first turn after it."""
        messages = [{"role": "system", "content": "\ue0000\ue001"}] if with_system else []
        messages += [{"role": role, "content": f"\ue000{i}\ue001"} for i, role in enumerate(roles, 1)]
        try:
            text = self._template.render(messages=messages, add_generation_prompt=True, **self._variables)
        except jinja2.TemplateError as error:
            order = ", ".join(str(message["role"]) for message in messages)
            raise InvalidRequest(
                f"the model's chat template refuses the roles {order}: {error}", param="messages"
            ) from error
        shape: list[tuple[int, ...] | int] = []
        for i, part in enumerate(_MARK.split(text)):
            if i % 2:
                shape.append(int(part))
            elif part:
                encoded = self._trusted.encode(part, add_special_tokens=False)
                shape.append(tuple(encoded.ids))
        wanted = list(range(0 if with_system else 1, len(roles) + 1))
        if [piece for piece in shape if isinstance(piece, int)] != wanted:
            raise InvalidRequest(
                "the model's chat template does not show every message exactly once, in order: "
                "it may have no system role, or rewrite earlier turns",
                param="messages",
            )
        return tuple(shape)


def _size(shape: Shape, contents: Sequence[Sequence[int]]) -> int:
    return sum(len(contents[piece] if isinstance(piece, int) else piece) for piece in shape)


def _is_reserved(token: dict[str, Any]) -> bool:
    """Whether text must never become this added token. Runs of blanks, which some tokenizers add, may."""
    return bool(token["special"]) or bool(token["content"].strip())


def _load_template(folder: Path) -> tuple[jinja2.Template, dict[str, str]]:
    config: dict[str, Any] = {}
    if (folder / "tokenizer_config.json").is_file():
        config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    file = folder / "chat_template.jinja"
    source = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(source, list):
        source = next((each["template"] for each in source if each["name"] == "default"), None)
    if not isinstance(source, str):
        raise InternalError(f"{folder.name} has no chat template: use an instruction-tuned model")
    # The settings that templates are written for. No clock is given, so a prompt is the same tomorrow.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    variables = {
        name: value if isinstance(value, str) else value.get("content", "")
        for name, value in config.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }
    return environment.from_string(source), variables


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
