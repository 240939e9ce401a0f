"""The settings that a decision depends on, be it the actor's or, while that is away, a gateway's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from grid.config import Config
from placement.targets import Targets


@dataclass(frozen=True, slots=True)
class Rules:
    """As `grid.yaml` has them, in the units of decisions."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """Alias to model."""
    lease_s: float = 30.0
    stale_after_s: float = 0.5
    prefer_region_wait_ms: float = 2000.0
    round_trip_ms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Of a gateway's region to those of units; "" stands for the cell's own. What is not here is near."""
    targets: Targets = Targets()  # noqa: RUF009 - it is immutable
    isolated_share_max: float = 0.5

    @classmethod
    def of(cls, config: Config) -> Rules:
        placement, targets = config.placement, config.placement.targets
        return cls(
            aliases={name: alias.model for name, alias in config.aliases.items()},
            lease_s=placement.lease_s,
            stale_after_s=placement.stale_after_ms / 1e3,
            prefer_region_wait_ms=placement.prefer_region_wait_ms,
            isolated_share_max=placement.isolated_share_max,
            round_trip_ms={"": placement.round_trip_ms} if placement.round_trip_ms else {},
            targets=Targets(targets.ttft_ms, targets.ttft_ms_per_prompt_token, targets.tpot_ms),
        )

    def model(self, name: str) -> str:
        """Return the model that `name` stands for: an alias' target, else itself."""
        return self.aliases.get(name, name)
