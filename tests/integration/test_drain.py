"""A node that has notice leaves at a step boundary while the others go on: nothing is computed twice, nobody saves, and
the weights are those of a run that was never disturbed. Several nodes on this machine, with a real etcd."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_harness.contract import variables
from etcd_servers import Cluster
from integration.harness import LANES
from integration.launch_tools import run
from integration.several import Hosts, Loopback
from unit.fake_metadata import fake_cloud

pytestmark = pytest.mark.slow
STEPS = 12
PATIENT = ("--grace", 90)
LEFT = "its workers left at a step boundary"
Weights = Callable[[int], str]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Hosts]:
    with Cluster(tmp_path) as cluster, Hosts(tmp_path, Loopback(), cluster, steps=STEPS) as job:
        yield job


def drained(nodes: Hosts, number: int) -> dict[str, Any]:
    """The end of a node that was drained."""
    nodes.until_ended(number, code=143)
    job = nodes.jobs[number]
    assert len(job.events("drain")) == 1 and not job.events("checkpoint_saved"), job.shown()
    end, = job.events("drained")
    return {**job.events("drain")[0], **end}


def computed_twice(nodes: Hosts) -> dict[tuple[int, int], int]:
    counts: Counter[tuple[int, int]] = Counter()
    for path in nodes.orders.glob("lanes-*"):
        for line in path.read_text().splitlines():
            step, low, high = json.loads(line)
            counts.update((step, lane) for lane in range(low, high))
    assert len(counts) == STEPS * LANES
    return {lane: count for lane, count in counts.items() if count > 1}


def only_planned(nodes: Hosts, number: int, world: int) -> None:
    """The last generation was planned: nobody aborted anything."""
    last = nodes.jobs[number].events("generation")[-1]
    assert len(last["members"]) == world and not last["urgent"], last


def saved(nodes: Hosts, number: int) -> list[int]:
    return [event["step"] for event in nodes.jobs[number].events("checkpoint_saved")]


def test_nodes_go_one_after_the_other(nodes: Hosts, undisturbed: Weights, tmp_path: Path) -> None:
    """The one that leads, which has rank 0 too, on request from another node. Then one by its cloud's notice, with a
    SIGTERM on top, and the last one by a file, as soon as there is another to go on."""
    with fake_cloud() as cloud:
        own = {0: (), 1: ("--notice-file", tmp_path / "go"), 2: ("--preemption-notices", "aws", *PATIENT)}
        for number in range(3):
            nodes.launch(number, *own[number], nodes="1:3", variables={variables.METADATA: cloud.address})
            if number == 0:
                nodes.until(lambda: nodes.status().get("leader") and nodes.leader() == 0, "the first node to lead")
        nodes.fill(3)
        nodes.advance(1)
        unknown = run("drain", nodes.jobs[1].run_dir, "n7")
        assert unknown.returncode == 2 and "0 nodes are called 'n7'" in unknown.stderr
        asked = run("drain", nodes.jobs[1].run_dir, "n0", "--timeout", 0)
        assert asked.returncode == 4 and "trains until then" in asked.stderr, asked
        nodes.until(lambda: nodes.jobs[0].events("drain"), "the request to come to the node")
        name = nodes.jobs[0].status()["node"]
        nodes.until(lambda: nodes.status()["nodes"][name]["draining"], "the drain in the store")
        assert nodes.jobs[0].status()["draining"]["source"] == "request"
        nodes.fill(2)
        assert drained(nodes, 0)["how"] == LEFT
        only_planned(nodes, 1, 2)

        cloud.action = {"action": "terminate", "time": "2099-01-01T00:00:00Z"}
        nodes.until(lambda: nodes.jobs[2].events("drain"), "the notice")
        nodes.jobs[2].send(signal.SIGTERM)
        nodes.fill(1)
        told = drained(nodes, 2)
        assert (told["source"], told["how"]) == ("aws", LEFT) and told["deadline"] > 4e9
    nodes.launch(3, nodes="1:3")
    nodes.until(lambda: nodes.ready() == 2, "another node, which is no member yet")
    (tmp_path / "go").write_text("the pool is upgraded")
    nodes.until(lambda: nodes.jobs[1].events("drain"), "the notice")
    while nodes.jobs[1].alive:
        nodes.advance()
        nodes.happens(lambda: not nodes.jobs[1].alive, 0.5)
    assert drained(nodes, 1)["why"] == "the pool is upgraded"
    nodes.finish(undisturbed(STEPS), 3)
    assert not computed_twice(nodes)


def test_all_go_at_once_and_the_last_step_is_saved(nodes: Hosts) -> None:
    """On both nodes, unless one of them was heard so late that the other one had been let go."""
    nodes.begin(2, *PATIENT, nodes="1:3")
    nodes.advance(1)
    for number in range(2):
        nodes.jobs[number].send(signal.SIGTERM)
    nodes.until_stopped(0, 1)
    kept = [saved(nodes, number) for number in range(2)]
    assert [nodes.committed()] in kept and all(each in ([], [nodes.committed()]) for each in kept), nodes.shown()


def test_two_go_at_the_same_time_and_one_of_them_dies(nodes: Hosts, undisturbed: Weights) -> None:
    nodes.begin(3, *PATIENT, nodes="1:3")
    nodes.advance(1)
    stays, dies, goes = nodes.leader(), (nodes.leader() + 1) % 3, (nodes.leader() + 2) % 3
    members = nodes.status()["members"]
    rank, = (i for i, member in enumerate(members) if member.startswith(f"n{dies}-"))
    nodes.order(rank, "exchange.header_sent")
    for number in (dies, goes):
        nodes.jobs[number].send(signal.SIGTERM)
    nodes.fill(1)
    nodes.until_ended(dies, goes, code=143)
    assert "was lost" in nodes.jobs[dies].events("drained")[0]["how"]
    assert nodes.jobs[goes].events("drained")[0]["how"] == LEFT
    nodes.finish(undisturbed(STEPS), stays)


def test_a_node_that_is_needed_trains_until_another_has_come(nodes: Hosts, undisturbed: Weights) -> None:
    nodes.begin(2)
    told = run("drain", nodes.jobs[0].run_dir, "--timeout", 0)
    assert told.returncode == 4, told
    nodes.advance(2)
    assert nodes.jobs[0].alive and len(nodes.status()["members"]) == 2
    assert nodes.jobs[0].record()["status"] == "draining"
    nodes.launch(2)
    nodes.until(lambda: nodes.ready() == 3, "the third node")
    while nodes.jobs[0].alive:
        nodes.advance()
        nodes.happens(lambda: not nodes.jobs[0].alive, 0.5)
    assert drained(nodes, 0)["how"] == LEFT
    nodes.finish(undisturbed(STEPS), 1, 2)
    assert not computed_twice(nodes)


def test_the_store_goes_with_all_nodes(nodes: Hosts) -> None:
    """Nobody can tell the nodes that all of them go. When half of the grace is over their workers agree on the end."""
    nodes.steps = 100
    nodes.begin(2, "--grace", 20)
    nodes.advance(1)  # all have heard that the generation is formed
    nodes.cluster.stop()
    for number in range(2):
        nodes.jobs[number].send(signal.SIGTERM)
    nodes.until_stopped(0, 1)
    assert saved(nodes, 0) == saved(nodes, 1) == [nodes.committed()], nodes.shown()


def test_an_agent_that_dies_while_its_node_is_drained_is_not_started_again(nodes: Hosts, undisturbed: Weights) -> None:
    nodes.begin(2, nodes="1:2")
    run("drain", nodes.jobs[0].run_dir, "--timeout", 0)
    os.kill(nodes.jobs[0].record()["agent_pid"], signal.SIGKILL)
    nodes.until(lambda: not nodes.jobs[0].alive, "its end")
    assert nodes.jobs[0].process.returncode == 143 and nodes.jobs[0].record()["status"] == "stopped"
    nodes.finish(undisturbed(STEPS), 1)
