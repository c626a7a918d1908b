"""How nodes agree through a store, every state of it, with one fault anywhere; with two of them where that is quick."""

from __future__ import annotations

import json
from itertools import combinations_with_replacement

import pytest

from elastic_harness.simulate import node_checker
from elastic_harness.simulate.checker import explore, walks
from elastic_harness.simulate.node_model import NodeModel, NodeSize
from elastic_harness.simulate.node_world import NodeFaults
from mutants.agreement import PATCHES, Agreed

ONE = [NodeFaults(**{kind: 1}) for kind in NodeFaults._fields]
QUICK = [
    NodeFaults(workers=2),
    NodeFaults(nodes=2),
    NodeFaults(losses=2),
    NodeFaults(workers=1, holds=1),
    NodeFaults(nodes=1, holds=1),
    NodeFaults(holds=2),
]
KINDS = NodeFaults._fields
PAIRS = [NodeFaults(*map(pair.count, KINDS)) for pair in combinations_with_replacement(KINDS, 2)]
KINDS_OF_JOB = {
    "warm": NodeSize(),
    "cold": NodeSize(cold=True),
    "two steps, with checkpoints": NodeSize(steps=2, checkpoint_every=1),
    "both needed": NodeSize(least_nodes=2, cold=True),
    "two workers on each": NodeSize(per_node=2),
}


def named(faults: NodeFaults) -> str:
    return "-".join(kind for kind, count in faults._asdict().items() for _ in range(count))


def check_every_state(size: NodeSize, budget: int) -> None:
    result = explore(NodeModel(size), budget)
    assert result.violation is None, "\n".join([result.detail, *result.trace])
    assert result.complete and result.done == result.ends > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS_OF_JOB, ids=lambda kind: kind.replace(" ", "-"))
@pytest.mark.parametrize("faults", [NodeFaults(), *ONE], ids=named)
def test_every_state_with_one_fault(kind: str, faults: NodeFaults) -> None:
    size = KINDS_OF_JOB[kind]
    check_every_state(NodeSize(**{**vars(size), "faults": faults}), 5_000)


@pytest.mark.slow
@pytest.mark.parametrize("faults", QUICK, ids=named)
def test_every_state_with_two_faults(faults: NodeFaults) -> None:
    check_every_state(NodeSize(faults=faults), 20_000)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["workers", "nodes", "holds", "drains"])
def test_every_state_with_a_node_that_is_told_to_go_and_another_fault(other: str) -> None:
    faults = NodeFaults(drains=2) if other == "drains" else NodeFaults(**{other: 1}, drains=1)
    check_every_state(NodeSize(steps=2, faults=faults), 20_000)


@pytest.mark.soak
@pytest.mark.parametrize("faults", [pair for pair in PAIRS if pair not in QUICK], ids=named)
def test_every_state_with_any_two_faults(faults: NodeFaults) -> None:
    check_every_state(NodeSize(faults=faults), 100_000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(7, 11))
def test_random_paths_of_three_nodes(seed: int) -> None:
    faults = NodeFaults(workers=2, nodes=2, leases=2, losses=1, holds=3)
    size = NodeSize(nodes=3, steps=2, least_nodes=2, checkpoint_every=1, cold=True, faults=faults)
    result = walks(NodeModel(size), 75, seed=seed)
    assert result.violation is None, "\n".join([f"seed {seed}: {result.detail}", *result.trace])
    assert result.done == 75


@pytest.mark.slow
@pytest.mark.parametrize(
    "patch",
    [pytest.param(p, marks=pytest.mark.slow) if p.deep else p for p in PATCHES],
    ids=lambda patch: patch.title.replace(" ", "-"),
)
def test_a_planted_mistake_is_found(patch: Agreed) -> None:
    with patch.planted():
        result = explore(NodeModel(patch.size), 40_000)
    assert result.violation == patch.kind, f"{result.states} states, {result.violation}: {result.detail}"
    assert result.trace


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert node_checker.main(["--node-deaths", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["complete"] and told["size"]["faults"]["nodes"] == 1 and told["violation"] is None
    with next(patch for patch in PATCHES if patch.title == "actions are carried out again").planted():
        assert node_checker.main(["--cold"]) == 1
    assert "VIOLATION carried out twice" in capsys.readouterr().out
