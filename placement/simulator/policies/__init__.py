"""The policies that can be simulated, by name: what people use today, each after its published rule, and
ours."""

from __future__ import annotations

from placement.simulator.policies.ablations import (
    WithoutLearning,
    WithoutPrefixes,
    WithoutRoundTrips,
    WithoutTargets,
)
from placement.simulator.policies.affinity import BoundedHash, RayPrefix, SglangCacheAware
from placement.simulator.policies.base import Policy
from placement.simulator.policies.grid import Grid
from placement.simulator.policies.learner import PlainLearner
from placement.simulator.policies.outstanding import LeastOutstanding, PowerOfTwo, Random, RoundRobin
from placement.simulator.policies.scored import Dynamo, Gorgo, LlmdScores, SkyWalker

BASELINES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        Random,
        RoundRobin,
        LeastOutstanding,
        PowerOfTwo,
        BoundedHash,
        RayPrefix,
        SglangCacheAware,
        LlmdScores,
        Dynamo,
        SkyWalker,
        Gorgo,
        PlainLearner,
    )
}

COMPARED: dict[str, type[Policy]] = {**BASELINES, Grid.name: Grid}
"""What `all` means."""

ABLATIONS: dict[str, type[Policy]] = {
    policy.name: policy for policy in (WithoutTargets, WithoutRoundTrips, WithoutPrefixes, WithoutLearning)
}

POLICIES: dict[str, type[Policy]] = {**COMPARED, **ABLATIONS}
