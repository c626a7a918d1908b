"""The store's knowledge of a run of several nodes. It can be read, or forgotten, from any machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from elastic_harness import shape
from elastic_harness.agent.decisions.store_link import STATUS
from elastic_harness.agent.options import LaunchOptions
from elastic_harness.errors import ConfigError, InfrastructureError
from elastic_harness.etcd.address import Address
from elastic_harness.etcd.gateway import TIMEOUT_S, Gateway
from elastic_harness.etcd.store import EtcdStore
from elastic_harness.membership import node
from elastic_harness.membership.records import read_decision, read_record
from elastic_harness.membership.types import node_of

_RUNS = "elastic-harness/"


def store_of(
    address: str, run_id: str, timeout_s: float = TIMEOUT_S, wake: Callable[[], None] = lambda: None
) -> EtcdStore:
    """Return the part of a store in which a run's keys are."""
    return EtcdStore(Gateway(Address.parse(address), timeout_s), f"{_RUNS}{run_id}/", wake)


def forget(options: LaunchOptions) -> str:
    """Let a run begin anew, unless nodes of it are there. Return what was done, in words."""
    assert options.store is not None
    store = store_of(options.store, options.store_id)
    entries = {entry.key: entry.revision for entry in store.range(node.EVERYTHING)}
    nodes = [key for key in entries if key.startswith(node.NODES)]
    if nodes:
        return f"{len(nodes)} nodes are in the run {options.store_id} already: this one joins them"
    forgotten = [key for key in (node.DECISION, node.STATE) if key in entries]
    store.txn({key: entries[key] for key in forgotten}, deletes=forgotten)
    return (
        f"what the store knew of the run {options.store_id} is forgotten"
        if forgotten
        else "the store knows no such run"
    )


def status(address: str, run_id: str) -> dict[str, Any]:
    """Return the run as the store has it: nodes, workers, generation. Raises ConfigError if there is none."""
    entries = {entry.key: entry.value for entry in store_of(address, run_id).range("")}
    if node.DECISION not in entries and not any(key.startswith(node.NODES) for key in entries):
        everything = EtcdStore(Gateway(Address.parse(address)), _RUNS).range("")
        known = {entry.key.partition("/")[0] for entry in everything}
        raise ConfigError(f"the store knows no run {run_id!r}; it knows {', '.join(sorted(known)) or 'none'}")
    decision = _read(read_decision, entries, node.DECISION) if node.DECISION in entries else {}
    told = _read(_read_status, entries, STATUS) if STATUS in entries else {}
    members = decision.get("members") or []
    nodes = {}
    for key in entries:
        if key.startswith(node.NODES):
            record = _read(read_record, entries, key)
            name = key.removeprefix(node.NODES).rpartition(".")[0]
            ranks = [rank for rank, member in enumerate(members) if node_of(member) == name]
            ready = len(record["members"])
            draining = not record["places"] and ready > 0  # it wants no workers, and those that it has are to leave
            nodes[name] = {"places": record["places"], "ready": ready, "ranks": ranks, "draining": draining}
    finished = decision.get("finished")
    return {
        "run": run_id,
        "store": address,
        "status": "finished" if finished is not None else "running" if nodes else "not running",
        "generation": decision.get("generation"),
        "members": members,
        "formed": decision.get("formed", False),
        "waiting": decision.get("paused", ""),
        "leader": entries.get(node.LEADER, "").removeprefix(node.NODES).rpartition(".")[0],
        "lineage": decision.get("known", {}).get("lineage", 0),
        "step": told.get("step"),
        "checkpoints": told.get("checkpoints", {}),
        "step_age_s": round(time.time() - told["at"], 1) if "at" in told else None,
        "nodes": nodes,
    }


def _read(read: Callable[[str], dict[str, Any]], entries: Mapping[str, str], key: str) -> dict[str, Any]:
    try:
        return read(entries[key])
    except ValueError as error:
        raise InfrastructureError(
            f"the store's value {key} was not written by a node of this run ({error}); a node that lives writes it "
            "anew: try again"
        ) from error


def _read_status(text: str) -> dict[str, Any]:
    """Return how far the run is. Raises ValueError."""
    told = shape.parse_object(text)
    shape.expect(told, {"step": int, "at": float, "checkpoints": dict[str, int]})
    return told
