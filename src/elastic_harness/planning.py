"""What failures cost a run, and what can be done about it: probabilities, checkpoint intervals, time and money. Pure.

Failures are taken for independent, each node's as rare as every other's, at any moment alike (a Poisson process). The
sources of the formulas:

    Young 1974   J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (1974)
    Daly 2006    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future
                 Generation Computer Systems 22 (2006)
    Saxena 2024  N. R. Saxena et al., Optimal checkpoint interval with availability as an objective function,
                 arXiv:2410.18124
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from elastic_harness.checkpoint.interval import daly_interval_s


def calculate_failure_probability(per_node_hour: float, nodes: int, hours: float) -> float:
    """Return how likely at least one of the nodes fails within so many hours: 1 − (1 − p)^(N·t). per_node_hour: p, how
    likely a node fails within an hour."""
    if not (0 <= per_node_hour <= 1 and nodes >= 0 and hours >= 0):
        raise ValueError(f"got probability {per_node_hour}, nodes {nodes}, hours {hours}; need 0 … 1, and none below 0")
    if per_node_hour == 1:
        return float(nodes * hours > 0)
    return -math.expm1(nodes * hours * math.log1p(-per_node_hour))


def young_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return the time between checkpoints that loses least, to first order (Young 1974)."""
    return math.sqrt(2 * cost_s * mtbf_s)


def available_interval_s(cost_s: float, mtbf_s: float, restart_s: float) -> float:
    """Return the time from one checkpoint to the next with which a run is available most (Saxena 2024)."""
    return cost_s + math.sqrt(2 * (mtbf_s + restart_s) * cost_s + cost_s * cost_s)


@dataclass(frozen=True)
class TimeShares:
    """What becomes of a run's time on all its nodes. The parts make 1."""

    useful: float
    checkpoints: float = 0.0  # being written while training waits
    repeated: float = 0.0  # steps that are computed again
    stopped: float = 0.0  # noticing failures, restarting, recovering, waiting for nodes
    missing: float = 0.0  # nodes that the run goes on without

    def losing(self, **lost: float) -> TimeShares:
        """Return the shares if, besides, so much of the time goes to one more thing."""
        ((name, share),) = lost.items()
        left = {part: (1 - share) * value for part, value in vars(self).items()}
        return TimeShares(**{**left, name: left[name] + share})


def restarting(interval_s: float, cost_s: float, restart_s: float, mtbf_s: float) -> TimeShares:
    """Return the shares of a run that saves after each `interval_s` of work, and begins again from there in `restart_s`
    at each failure (the complete model of Daly 2006: also while it saves or restarts it may fail)."""
    if mtbf_s == math.inf:
        segment_s = interval_s + cost_s
        return TimeShares(interval_s / segment_s, cost_s / segment_s)
    try:
        segment_s = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + cost_s) / mtbf_s)
    except OverflowError:
        segment_s = math.inf
    if segment_s == math.inf:
        return TimeShares(0.0, stopped=1.0)
    useful, saving, stopped = interval_s / segment_s, cost_s / segment_s, -math.expm1(-restart_s / mtbf_s)
    return TimeShares(useful, saving, max(0.0, 1 - useful - saving - stopped), stopped)


@dataclass(frozen=True)
class Nodes:
    """A run's nodes. spares: nodes beyond those that it computes with. replace_s: until a lost one is replaced."""

    count: int
    node_mtbf_s: float
    replace_s: float = 1800.0
    spares: int = 0

    @property
    def mtbf_s(self) -> float:
        """The mean time between failures of any of the nodes at work."""
        return self.node_mtbf_s / self.count

    def _gone(self) -> list[float]:
        """Return how likely 0, 1, 2, … nodes are away at a time (as many as matter)."""
        away = self.replace_s / (self.node_mtbf_s + self.replace_s) if self.node_mtbf_s < math.inf else 0.0
        mean, most = (self.count + self.spares) * away, self.count + self.spares
        first = math.exp(-mean)
        if first == 0.0:  # hundreds are away: it is the mean that counts
            return [float(number == round(mean)) for number in range(min(most, round(mean)) + 1)]
        likely = [first]
        while len(likely) <= most and not (len(likely) > mean and likely[-1] < 1e-15):
            likely.append(likely[-1] * mean / len(likely))
        return likely

    @property
    def complete(self) -> float:
        """How likely no node is missing, thanks to the spares."""
        return min(1.0, math.fsum(self._gone()[: self.spares + 1]))

    @property
    def missing(self) -> float:
        """Which part of the nodes is missing on average, after the spares."""
        gone = enumerate(self._gone())
        return min(1.0, math.fsum(max(0, number - self.spares) * likely for number, likely in gone) / self.count)


@dataclass(frozen=True)
class FailureCosts:
    """What saving and failing costs a run, in seconds. outage_mtbf_s: between failures of all nodes together, or of as
    many that nobody holds the state any more."""

    checkpoint_s: float = 30.0
    restart_s: float = 300.0  # to notice a failure, and to start all workers again from a checkpoint
    recovery_s: float = 2.0  # of recovery in place: from a loss until the run is where it would have been
    outage_mtbf_s: float = 30 * 86_400.0


@dataclass(frozen=True)
class Strategy:
    """A way to go on after failures, and what becomes of the run's time."""

    name: str
    what: str
    interval_s: float  # between checkpoints on disk
    shares: TimeShares


def strategies(nodes: Nodes, costs: FailureCosts) -> list[Strategy]:
    """Return what becomes of the same run with three ways to go on, each with the interval that loses least."""
    every = daly_interval_s(costs.checkpoint_s, nodes.mtbf_s)
    whole = restarting(every, costs.checkpoint_s, costs.restart_s, nodes.mtbf_s)
    again = costs.restart_s / (nodes.mtbf_s + costs.restart_s)  # elastic: when the lost node is back, all restart
    outages = min(costs.outage_mtbf_s, nodes.node_mtbf_s) if nodes.count == 1 else costs.outage_mtbf_s
    rarely = daly_interval_s(costs.checkpoint_s, outages)
    rare = restarting(rarely, costs.checkpoint_s, costs.restart_s, outages)
    pauses = 0.0 if nodes.count == 1 else costs.recovery_s / (nodes.mtbf_s + costs.recovery_s)
    return [
        Strategy(
            "restart, fixed size",
            "all workers restart from a checkpoint, and wait until there are as many nodes as before",
            every,
            whole.losing(stopped=1 - nodes.complete),
        ),
        Strategy(
            "restart, elastic",
            "all workers restart from a checkpoint with the nodes that are left, and once more when one comes back",
            every,
            whole.losing(stopped=again).losing(missing=nodes.missing),
        ),
        Strategy(
            "in place",
            "the other workers go on within the step; checkpoints are for the loss of everything",
            rarely,
            rare.losing(stopped=pauses).losing(missing=nodes.missing),
        ),
    ]


@dataclass(frozen=True)
class Bill:
    """What a strategy costs for so many hours by the clock."""

    total: float
    spares: float  # of it: paid for nodes that wait
    lost: dict[str, float] = field(default_factory=dict)  # of it: paid for time that was not useful, by what it was

    def per_useful_node_hour(self, useful_node_hours: float) -> float:
        return self.total / useful_node_hours if useful_node_hours else math.inf


def bill(nodes: Nodes, shares: TimeShares, hours: float, price: float) -> Bill:
    """Return the bill of nodes that cost `price` an hour each. A missing node costs nothing."""
    paid = nodes.count * hours * price
    lost = {name: paid * share for name, share in vars(shares).items() if name not in ("useful", "missing")}
    spares = nodes.spares * hours * price
    return Bill(paid * (1 - shares.missing) + spares, spares, lost)
