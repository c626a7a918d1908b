"""Looks at every state that the protocol can reach, within a budget, and names the first broken invariant.

    python -m elastic_harness.simulate.checker --workers 3 --steps 2 --crashes 1 --joins 1 --budget 200000 --json

The search is breadth first, so a counterexample is a shortest one. For worlds that are too large to be exhausted,
`walks` follows random paths instead. Every end of a path is checked too: nobody may be stuck while enough workers are
healthy.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

from elastic_harness.simulate.model import Model, Size
from elastic_harness.simulate.node_model import NodeSize
from elastic_harness.simulate.world import Faults, Move, Violation

W = TypeVar("W")


class Explored(Protocol[W]):
    """The part of a model that the search uses. Its worlds can be hashed."""

    def start(self) -> W: ...

    def moves(self, world: W) -> Iterator[tuple[Move, W | Violation, bool]]:
        """Yield (what, next world or violation, whether it is a fault) for everything that can happen now."""

    def is_done(self, world: W) -> bool:
        """Return whether the job is complete."""

    def check_end(self, world: W) -> None:
        """Raise Violation if the job should not have ended like this. Only faults can happen in this world any more."""


@dataclass(frozen=True)
class Result:
    """The outcome of a search."""

    states: int
    moves: int
    ends: int  # states in which nothing but faults can happen any more
    done: int  # … and the job is complete
    complete: bool  # every reachable state was looked at
    seconds: float
    violation: str | None = None  # its kind
    detail: str = ""
    trace: tuple[str, ...] = ()  # the moves to the violation


def explore(model: Explored[W], budget: int) -> Result:
    """Search breadth first through at most `budget` states. Stop at the first violation."""
    began = time.monotonic()
    start = model.start()
    number: dict[W, int] = {start: 0}
    parents: list[tuple[int, Move]] = [(-1, ())]
    frontier = [start]
    moves = ends = done = 0

    def found(violation: Violation, at: int, last: Move | None) -> Result:
        trace = [] if last is None else [last]
        while at > 0:
            at, move = parents[at]
            trace.append(move)
        text = tuple(" ".join(map(str, move)) for move in reversed(trace))
        spent_s = time.monotonic() - began
        return Result(len(number), moves, ends, done, False, spent_s, violation.kind, violation.detail, text)

    complete = True
    while frontier:
        following: list[W] = []
        for world in frontier:
            at = number[world]
            alive = False
            for move, after, fault in model.moves(world):
                moves += 1
                if isinstance(after, Violation):
                    return found(after, at, move)
                if after == world:
                    continue
                alive = alive or not fault
                if after not in number:
                    if len(number) >= budget:
                        complete = False
                        continue
                    number[after] = len(parents)
                    parents.append((at, move))
                    following.append(after)
            if not alive:
                ends += 1
                done += model.is_done(world)
                try:
                    model.check_end(world)
                except Violation as violation:
                    return found(violation, at, None)
        frontier = following
    return Result(len(number), moves, ends, done, complete, time.monotonic() - began)


def walks(model: Explored[W], count: int, seed: int, fault_rate: float = 0.05, length_max: int = 2000) -> Result:
    """Follow `count` random paths, each to its end. The seed reproduces them."""
    began = time.monotonic()
    rng = random.Random(seed)
    moves = ends = done = 0
    for _ in range(count):
        world = model.start()
        trace: list[Move] = []
        for _ in range(length_max):
            options = [o for o in model.moves(world) if o[1] != world]
            faults = [o for o in options if o[2]]
            others = [o for o in options if not o[2]]
            if not others:
                try:
                    model.check_end(world)
                except Violation as violation:
                    return _walk_failed(violation, moves, ends, done, began, trace)
                ends += 1
                if not faults:
                    done += model.is_done(world)
                    break
            pool = faults if faults and (not others or rng.random() < fault_rate) else others
            move, after, _ = rng.choice(pool)
            trace.append(move)
            moves += 1
            if isinstance(after, Violation):
                return _walk_failed(after, moves, ends, done, began, trace)
            world = after
        else:
            never = Violation("never ends", f"{length_max} moves without an end")
            return _walk_failed(never, moves, ends, done, began, trace)
    return Result(0, moves, ends, done, False, time.monotonic() - began)


def _walk_failed(violation: Violation, moves: int, ends: int, done: int, began: float, trace: list[Move]) -> Result:
    text = tuple(" ".join(map(str, move)) for move in trace)
    return Result(0, moves, ends, done, False, time.monotonic() - began, violation.kind, violation.detail, text)


def as_text(result: Result) -> str:
    """Return the result in words, a violation with the path to it."""
    extent = "every state" if result.complete else "a part of the states"
    ends = f"{result.ends} ends ({result.done} with the job done)"
    lines = [f"{extent}: {result.states} states, {result.moves} moves, {ends}, {result.seconds:.1f} s"]
    if result.violation:
        lines.append(f"VIOLATION {result.violation}: {result.detail}")
        lines += [f"  {i:3} {line}" for i, line in enumerate(result.trace, 1)]
    return "\n".join(lines)


def add_search_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--budget", type=int, default=200_000, help="states to look at, at most")
    parser.add_argument("--walks", type=int, default=0, help="random paths instead of all states")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")


def search(model: Explored[W], size: Size | NodeSize, args: argparse.Namespace) -> int:
    """Look at the worlds of a model as the command line says, print the result, and return the exit code."""
    result = walks(model, args.walks, args.seed) if args.walks else explore(model, args.budget)
    if args.json:
        print(
            json.dumps({"size": {**asdict(size), "faults": size.faults._asdict()}, "seed": args.seed, **asdict(result)})
        )
    else:
        print(as_text(result))
    return 1 if result.violation else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="checker", description="Check the recovery protocol, state by state.")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--lanes", type=int, default=2, help="fewer than workers: some have nothing to compute")
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--min-workers", type=int, default=1)
    parser.add_argument("--target", type=int, default=None, help="workers wanted; default: --workers")
    parser.add_argument("--shards", type=int, default=1, help="so many workers are one replica")
    parser.add_argument("--crashes", type=int, default=1)
    parser.add_argument("--joins", type=int, default=0)
    parser.add_argument("--zombies", type=int, default=0, help="workers declared lost that run on")
    parser.add_argument("--breaks", type=int, default=0, help="links that break for one generation")
    parser.add_argument("--checkpoint-every", type=int, default=0)
    parser.add_argument("--follows", action="store_true", help="the batch follows the number of workers")
    parser.add_argument("--scale", type=int, action="append", default=[], help="a wanted size set at any moment")
    add_search_options(parser)
    args = parser.parse_args(argv)
    size = Size(
        workers=args.workers,
        steps=args.steps,
        lanes=args.lanes,
        blocks=args.blocks,
        min_workers=args.min_workers,
        target=args.target,
        checkpoint_every=args.checkpoint_every,
        faults=Faults(args.crashes, args.joins, args.zombies, args.breaks, tuple(args.scale)),
        shards=args.shards,
        follows=args.follows,
    )
    return search(Model(size), size, args)


if __name__ == "__main__":
    sys.exit(main())
