"""What a run is asked to do beside what it sends: when requests leave, how many, in which phase and stage.

Phase and stage are fixed when a request is sent. In an open loop request k of the one global schedule is a request of
the user class that a seeded pattern names; a fixed number of requests is the first so many of the same pattern, so the
multiset that is sent does not depend on workers, nor on open or closed loop.
"""

from typing import Any

import msgspec

from vllm_locust.arrivals import Arrivals
from vllm_locust.quantity import NS_PER_S
from vllm_locust.scenario import pattern


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is asked to do."""

    arrivals: Arrivals | None = None
    """When requests leave; absent in a closed loop."""
    max_in_flight: int | None = None
    """In an open loop: how many streams there may be at once, over all workers."""
    weights: dict[str, int] = {}
    """User classes that share arrivals and fixed amounts, and their Locust weights."""
    requests: int | None = None
    """How many requests there are in all, where that is fixed."""
    retries: int = 0
    """How often what failed is asked again at the end."""
    warmup_ns: int = 0
    """How long the warm-up is at most."""
    until_answered: bool = False
    """Whether it ends sooner, once all users run and each has finished a request."""
    stages: tuple[float, ...] = ()
    """Users, or requests per second in an open loop, of one stage after the other."""
    stage_ns: int = 0

    def stage(self, at_ns: int) -> int:
        """Return the stage of an instant since the start of the run, from 1; 0 in a run without stages."""
        return min(len(self.stages), 1 + max(0, at_ns) // self.stage_ns) if self.stages else 0

    @property
    def length_ns(self) -> int | None:
        """How long all stages take."""
        return len(self.stages) * self.stage_ns or None

    @property
    def stages_ns(self) -> tuple[int, ...]:
        """When each stage begins, and when the last one ends; empty without stages."""
        return tuple(number * self.stage_ns for number in range(len(self.stages) + 1)) if self.stages else ()

    def boundaries_ns(self, steady_ns: int) -> tuple[int, ...]:
        """Return when windows end early: at the end of the warm-up and of each stage."""
        return (steady_ns, *self.stages_ns)

    def rate_text(self, at_ns: int) -> str:
        """Name the stretch of the rate profile that an instant is in; empty in a closed loop, and in a trace."""
        since_ns, stretches = 0, () if self.arrivals is None else self.arrivals.profile
        for position, stretch in enumerate(stretches):
            since_ns += stretch.length_ns or 0
            if at_ns < since_ns or stretch.length_ns is None or position + 1 == len(stretches):
                return f"{'to ' if stretch.ramp and at_ns < since_ns else ''}{stretch.rate_per_s:g}/s"
        return ""

    def facts(self) -> dict[str, Any]:
        """Return what was asked for beyond users, for people and for comparisons; what was not asked is absent."""
        arrivals, facts = self.arrivals, {}
        if arrivals is not None:
            facts = {
                "arrivals": arrivals.process,
                "burstiness": arrivals.burstiness if arrivals.process == "gamma" else None,
                "request_rate": arrivals.profile[0].rate_per_s if len(arrivals.profile) == 1 else None,
                "profile": msgspec.to_builtins(arrivals.profile) if len(arrivals.profile) > 1 else None,
            }
        facts |= {"max_in_flight": self.max_in_flight, "requests": self.requests, "retry_failed": self.retries or None}
        if self.stages:
            facts |= {"stages": list(self.stages), "stage_s": self.stage_ns / NS_PER_S}
        return {name: value for name, value in facts.items() if value is not None}

    def request(self, seed: int, number: int) -> tuple[str, int]:
        """Return user class and index of a request of the whole run."""
        names, weights = tuple(self.weights), tuple(self.weights.values())
        block, place = divmod(number, sum(weights))
        chosen, earlier = pattern(seed, "", block, weights)[place]
        return names[chosen], block * weights[chosen] + earlier

    def amounts(self, seed: int) -> dict[str, int] | None:
        """Return how many requests of each user class there are, None where their number is not fixed."""
        if self.requests is None:
            return None
        weights = tuple(self.weights.values())
        blocks, rest = divmod(self.requests, sum(weights))
        chosen = [number for number, _ in pattern(seed, "", blocks, weights)[:rest]]
        return {
            name: blocks * weight + chosen.count(number) for number, (name, weight) in enumerate(self.weights.items())
        }
