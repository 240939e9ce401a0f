"""Placeholders in prompts and the variables of a call. Pure. `invocation.py` says where they mean what."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gateway.pipeline.contract import MAX_TEXT_CHARS
from grid.errors import InvalidRequest, TooLarge

PLACEHOLDER = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_]{0,63})\s*\}\}")


class Variables:
    """Fills placeholders, and remembers which variables were used."""

    def __init__(self, values: Mapping[str, str] | None) -> None:
        self.given = values is not None
        self._values = values or {}
        self._used: set[str] = set()

    def filled(self, text: str) -> str:
        """Return `text` with every placeholder's value.

        Raises InvalidRequest for a placeholder without a value, TooLarge for what no prompt can hold.
        """
        size = len(text)

        def value(match: re.Match[str]) -> str:
            nonlocal size
            name = match[1]
            param = f"variables.{name}"
            found = self._values.get(name)
            if found is None:
                raise InvalidRequest(
                    f"{param}: is missing; the prompt has the placeholder `{match[0]}`, so give it a value",
                    param=param,
                )
            self._used.add(name)
            size += len(found)
            # Checked on the way, because a value may stand in many places.
            if size > MAX_TEXT_CHARS:
                raise TooLarge(
                    f"{param}: makes the prompt longer than {MAX_TEXT_CHARS} characters", param=param
                )
            return found

        return PLACEHOLDER.sub(value, text) if "{{" in text else text

    def check_all_used(self) -> None:
        """Raises InvalidRequest for a variable that stands nowhere: most likely its name is misspelt."""
        for name in self._values:
            if name not in self._used:
                raise InvalidRequest(
                    f"variables.{name}: unknown; neither `system_prompt` nor `input` has its placeholder",
                    param=f"variables.{name}",
                )
