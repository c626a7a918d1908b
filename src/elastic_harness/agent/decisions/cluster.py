"""Several nodes that decide together, through a store. Drives `membership.node.Node` with what happens on this node."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import time
from collections.abc import Iterable
from typing import Any

from elastic_harness import __version__
from elastic_harness.agent.decisions.agreement import CarryOut, Deliver
from elastic_harness.agent.decisions.store_link import StoreLink
from elastic_harness.agent.decisions.store_view import store_of
from elastic_harness.agent.loop import Agent
from elastic_harness.contract.messages import PROTOCOL, Alarm
from elastic_harness.errors import InfrastructureError
from elastic_harness.incidents import table
from elastic_harness.membership import protocol
from elastic_harness.membership.lead import HISTORY
from elastic_harness.membership.node import (
    Carry,
    Damaged,
    Described,
    Excluded,
    Happened,
    Input,
    Node,
    NodeLeaves,
    NodeTick,
    Offered,
    Output,
    PlacesScaled,
)
from elastic_harness.membership.node import (
    Deliver as Delivered,
)
from elastic_harness.membership.records import Known
from elastic_harness.membership.types import Limits
from elastic_harness.runs.fingerprints import HARDWARE_KEYS

AWAY_NOTICE_S = 3.0
STATUS_S = 5.0
EXPIRY_S = 1.0  # so long etcd may take to notice that a lease has ended


class Together:
    """See `agreement.Agreement`. The agent makes it, and is woken by it when the store has something to say."""

    def __init__(self, agent: Agent, limits: Limits, known: Known, carry_out: CarryOut, deliver: Deliver) -> None:
        options = agent.options
        assert options.store is not None
        self._agent = agent
        self._carry_out = carry_out
        self._deliver = deliver
        self.node = f"{options.node_name}-{os.urandom(3).hex()}"
        self.least = 1
        about: dict[str, Any] = {"elastic_harness": __version__, "protocol": PROTOCOL}
        if agent.records.history:
            about[HISTORY] = agent.records.history
        self._node = Node(self.node, limits, options.workers, known, about)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        ttl_s = max(1.0, options.node_timeout_s - EXPIRY_S)
        store = store_of(options.store, options.store_id, wake=self._ring)
        keeper = store_of(options.store, options.store_id, ttl_s / 2)
        self._link = StoreLink(store, keeper, ttl_s, self._ring)
        self._ttl_s = ttl_s
        self._ever = False  # a decision was carried out
        self._away_shown = False
        self._status_at = 0.0

    @property
    def born(self) -> bool:
        return self._node.state.own.known.born

    @property
    def saved(self) -> bool:
        return self._node.state.own.known.saved

    def start(self) -> None:
        options = self._agent.options
        self._agent.console.notice(
            f"node {self.node} at {options.host}, which agrees with others through {options.store}"
        )
        self._agent.listen(self._bell, selectors.EVENT_READ, lambda _: self._hear())
        self._do(self._node.start())

    def tell(self, event: protocol.Event, at: float | None = None) -> None:
        self._take(Happened(event))

    def offer(self, generation: int, key: str, value: str) -> None:
        self._take(Offered(generation, key, value))

    def describe(self, fingerprint: dict[str, Any]) -> None:
        relaxed = fingerprint.get("exactness") == "relaxed"
        self._take(Described({k: v for k, v in fingerprint.items() if not (relaxed and k in HARDWARE_KEYS)}))

    def scale(self, places: int) -> None:
        self._take(PlacesScaled(places))

    def tick(self) -> None:
        self._take(NodeTick())
        self._say_if_away()
        self._look_at_renewals()
        now = time.monotonic()
        if self._node.leads and now - self._status_at > STATUS_S:
            self._status_at = now
            records = self._agent.records
            told = {"step": records.committed, "at": records.committed_at, "checkpoints": self._agent.checkpoints}
            self._link.show_status(json.dumps(told))

    def leave(self) -> bool:
        if self._link.trouble is not None:
            return False
        self._take(NodeLeaves())
        return True

    def stop_all(self, reason: str) -> bool:
        if self._link.trouble is not None:
            raise InfrastructureError(
                f"the other nodes cannot be told to stop: {self._link.trouble[1]} Try again when the store is back, or "
                "send SIGTERM to the launch on each node"
            )
        self.tell(protocol.StopAsked(reason))
        return True

    def status(self) -> dict[str, Any]:
        trouble = self._link.trouble
        return {
            "node": self.node,
            "store": None
            if trouble is None
            else f"cannot be used for {time.monotonic() - trouble[0]:.0f} s: {trouble[1]}",
            "leader": self._node.state.led_by.rpartition("/")[2].rpartition(".")[0],
        }

    def close(self) -> None:
        self._agent.listen(self._bell, 0, None)
        self._link.close()  # the bell stays: a thread that waits for the store may still ring it

    # ---- between the node and the store

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it rings already
            os.eventfd_write(self._bell, 1)

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        self._do(self._node.take_all(self._link.heard(), time.monotonic()))
        self._say_if_away()

    def _take(self, told: Input) -> None:
        self._do(self._node.take(told, time.monotonic()))

    def _do(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            match output:
                case Carry(action):
                    self._ever = True
                    self._carry_out(action)
                case Delivered(values):
                    self._deliver(values)
                case Excluded(reason):
                    self._excluded(reason)
                case Damaged(key, why):
                    self._agent.records.event("store_damaged", key=key, error=why)
                    self._agent.console.notice(
                        f"the store's value {key} was not written by a node of this run ({why}); it is ignored, and "
                        "the node that owns it writes it anew"
                    )
                case _:
                    self._link.ask(output)
        if self._node.state.own.history != self._agent.records.history:
            self._agent.records.remember(history=self._node.state.own.history)

    def _excluded(self, reason: str) -> None:
        message = (
            f"this node does not fit the run: {reason}. Give all nodes the same version, configuration and data; a run "
            "that was begun otherwise is continued as it was, or begun anew with --fresh on all nodes"
        )
        self._agent.fail(table.NODE_REFUSED, message)

    def _look_at_renewals(self) -> None:
        """Tell if the store answers so late that the lease may be lost: with it the workers here count as lost."""
        took_s = self._link.late_renewal()
        if took_s is not None:
            message = (
                f"the store takes {took_s:.2f} s to renew this node's lease of {self._ttl_s:g} s; if it takes longer "
                "than the lease, the others go on without this node. Look at the store's disk and at the network, or "
                "raise --node-timeout"
            )
            evidence = {"took_s": round(took_s, 3), "lease_s": self._ttl_s}
            self._agent.alarms.tell(Alarm("store", "warning", message, evidence))

    def _say_if_away(self) -> None:
        trouble = self._link.trouble
        if trouble is None and self._away_shown:
            self._away_shown = False
            self._agent.records.event("store_back")
            self._agent.console.notice("the store is back")
        elif trouble is not None and not self._away_shown and time.monotonic() - trouble[0] > AWAY_NOTICE_S:
            self._away_shown = True
            self._agent.records.event("store_away", error=trouble[1])
            goes_on = "Training goes on; what happens to workers meanwhile waits"
            if not self._ever:
                goes_on = "Nothing is trained before it can be; `elastic-harness doctor --store …` says more"
            self._agent.console.notice(f"the store cannot be used ({trouble[1]}) {goes_on}")
