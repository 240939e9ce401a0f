"""Which steps of a run may begin: each once, after all that it uses. Pure.

    waiting ──all that it uses has ended──▶ begun ──▶ ended

Steps that don't use each other are handed out together. A step uses only steps before it, so some step can
always begin until all have ended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


class Frontier:
    """`uses` names for each step the steps that end before it begins."""

    def __init__(self, uses: Mapping[str, Collection[str]]) -> None:
        self._waiting = {step_id: set(used) for step_id, used in uses.items()}
        self._begun: set[str] = set()

    def begin(self) -> list[str]:
        """Return the steps that may begin now, in the order of `uses`; they count as begun."""
        ready = [step_id for step_id, left in self._waiting.items() if not left]
        for step_id in ready:
            del self._waiting[step_id]
        self._begun.update(ready)
        return ready

    def ended(self, step_id: str) -> None:
        """Take note that a step that had begun has ended."""
        self._begun.remove(step_id)
        for left in self._waiting.values():
            left.discard(step_id)

    @property
    def is_done(self) -> bool:
        """Whether every step has ended."""
        return not self._waiting and not self._begun
