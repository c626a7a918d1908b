"""Looks at every state that nodes can reach which agree through a store, and names the first broken invariant.

    python -m elastic_harness.simulate.node_checker --node-deaths 1 --holds 1
    python -m elastic_harness.simulate.node_checker --nodes 3 --leases 2 --losses 1 --walks 1000 --seed 7

The search is that of `checker`, in the worlds of `node_model`. Exit code 1 says that an invariant was violated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from elastic_harness.simulate.checker import add_search_options, search
from elastic_harness.simulate.node_model import NodeModel, NodeSize
from elastic_harness.simulate.node_world import NodeFaults


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="node_checker", description="Check how nodes agree, state by state.")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--per-node", type=int, default=1, help="workers of each node")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--least-nodes", type=int, default=1, help="with fewer the job waits")
    parser.add_argument("--checkpoint-every", type=int, default=0)
    parser.add_argument("--cold", action="store_true", help="begin before the nodes know each other")
    parser.add_argument("--worker-deaths", type=int, default=0)
    parser.add_argument("--node-deaths", type=int, default=0)
    parser.add_argument("--leases", type=int, default=0, help="that end though their node lives")
    parser.add_argument("--losses", type=int, default=0, help="of all that the store holds")
    parser.add_argument("--damages", type=int, default=0, help="of a value in the store")
    parser.add_argument("--holds", type=int, default=0, help="on a way to or from the store")
    parser.add_argument("--drains", type=int, default=0, help="of nodes, which come again when their workers have left")
    add_search_options(parser)
    args = parser.parse_args(argv)
    size = NodeSize(
        nodes=args.nodes,
        per_node=args.per_node,
        steps=args.steps,
        least_nodes=args.least_nodes,
        checkpoint_every=args.checkpoint_every,
        cold=args.cold,
        faults=NodeFaults(
            args.worker_deaths, args.node_deaths, args.leases, args.losses, args.damages, args.holds, args.drains
        ),
    )
    return search(NodeModel(size), size, args)


if __name__ == "__main__":
    sys.exit(main())
