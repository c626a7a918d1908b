"""The message to the user when the network is cut between this node and another one."""

from __future__ import annotations

import time
from collections.abc import Mapping

from elastic_harness.agent.loop import Agent
from elastic_harness.membership.protocol import APART_S
from elastic_harness.membership.types import node_of


class Cuts:
    """Prints one line for each node that cannot be reached, however many workers notice, until that node is tried
    again."""

    def __init__(self, agent: Agent, node: str) -> None:
        self._agent = agent
        self._node = node
        self._shown_at: dict[str, float] = {}

    def tell(self, ways: Mapping[str, str]) -> None:
        """Tell that a worker of this node cannot reach these members. `ways`: at which address, and what shows it."""
        now = time.monotonic()
        for member, way in ways.items():
            peer = node_of(member)
            if peer == self._node or now < self._shown_at.get(peer, -APART_S) + APART_S:
                continue
            self._shown_at[peer] = now
            self._agent.records.event("unreachable", node=self._node, peer=peer, way=way)
            self._agent.console.notice(
                f"node {self._node} cannot reach node {peer} at {way}; check the firewall between them, or choose the "
                f"network with --host. They are kept apart for {APART_S:g} s"
            )
