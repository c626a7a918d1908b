"""The computed order of samples: what one id costs, and whether it can be told from a true shuffle.

    python -m benchmarks.order

Speed: nanoseconds per sample id at 10^9 samples, in blocks as the data set asks for them. Randomness: five statistics
of whole permutations, each over many (seed, epoch) pairs, beside the same statistics of numpy's shuffle. A statistic
gives one p-value per permutation; those of a good order are uniform, which a Kolmogorov-Smirnov test judges. The tests:

- pairs: chi-squared of (position, id) counted in 32 x 32 cells
- ascents: the number of positions whose id is followed by a greater one; mean (n-1)/2, variance (n+1)/12
- serial: correlation of each id with the next one
- steps: chi-squared of the differences between neighbours, modulo n, in 256 classes
- epochs: correlation of an epoch's order with the next epoch's
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common import finish, say, summary, target
from elastic_harness.data.dataset import BLOCK
from elastic_harness.data.order import EpochOrder, sample_ids

Order = npt.NDArray[np.int64]


def normal_p(z: float) -> float:
    """Two-sided p-value of a standard normal statistic."""
    return math.erfc(abs(z) / math.sqrt(2))


def chi_squared_p(counts: npt.NDArray[Any], expected: float, degrees: int) -> float:
    """Upper p-value; Wilson and Hilferty's cube-root approximation (1931), good for this many cells."""
    value = float(((counts - expected) ** 2).sum() / expected)
    z = ((value / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


def pairs(order: Order, following: Order) -> float:
    n, cells = len(order), 32
    where = np.arange(n) * cells // n * cells + order * cells // n
    counts = np.bincount(where, minlength=cells * cells)
    # Rows and columns are fixed by n: the table has (cells - 1)^2 degrees of freedom.
    return chi_squared_p(counts, n / cells**2, (cells - 1) ** 2)


def ascents(order: Order, following: Order) -> float:
    n = len(order)
    return normal_p((np.count_nonzero(np.diff(order) > 0) - (n - 1) / 2) / math.sqrt((n + 1) / 12))


def serial(order: Order, following: Order) -> float:
    n = len(order)
    return normal_p((float(np.corrcoef(order[:-1], order[1:])[0, 1]) + 1 / n) * math.sqrt(n))


def steps(order: Order, following: Order) -> float:
    n, classes = len(order), 256
    differences = np.diff(order) % n
    return chi_squared_p(np.bincount(differences * classes // n, minlength=classes), (n - 1) / classes, classes - 1)


def epochs(order: Order, following: Order) -> float:
    return normal_p(float(np.corrcoef(order, following)[0, 1]) * math.sqrt(len(order) - 1))


TESTS: dict[str, Callable[[Order, Order], float]] = {
    "pairs": pairs,
    "ascents": ascents,
    "serial": serial,
    "steps": steps,
    "epochs": epochs,
}


def uniform_p(values: Sequence[float]) -> float:
    """Kolmogorov-Smirnov p-value against the uniform distribution (asymptotic, with Stephens' correction)."""
    ordered, n = sorted(values), len(values)
    distance = max(max((i + 1) / n - v, v - i / n) for i, v in enumerate(ordered))
    x = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance
    return max(0.0, min(1.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * x * x) for k in range(1, 101))))


def randomness(n: int, permutations: int) -> dict[str, Any]:
    """The tests on the orders of many seeds and epochs, and on as many shuffles by numpy."""
    found: dict[str, dict[str, list[float]]] = {"ours": {}, "numpy": {}}
    draw = np.random.default_rng(1)
    for number in range(permutations):
        order = EpochOrder(n, seed=number // 2)
        epoch = number % 2
        both = {
            "ours": [sample_ids(order, e, np.arange(n)) for e in (epoch, epoch + 1)],
            "numpy": [draw.permutation(n) for _ in range(2)],
        }
        assert np.bincount(both["ours"][0], minlength=n).max() == 1, "not a permutation"
        for system, (first, second) in both.items():
            for name, test in TESTS.items():
                found[system].setdefault(name, []).append(test(first, second))
    result: dict[str, Any] = {"n": n, "permutations": permutations}
    for system, tests in found.items():
        result[system] = {
            name: {"uniform_p": round(uniform_p(values), 4), "smallest_p": float(f"{min(values):.3g}")}
            for name, values in tests.items()
        }
    say(f"n = {n:,}: {result['ours']}")
    return result


def speed(n: int, rounds: int) -> dict[str, Any]:
    """Nanoseconds per id, in blocks as the data set asks for them, and for one step's worth."""
    order, out = EpochOrder(n, 7), {}
    for block in (BLOCK, 512):
        times = []
        for number in range(rounds):
            begun = time.perf_counter()
            for at in range(16):
                sample_ids(
                    order, 0, np.arange(number * 16 * block + at * block, number * 16 * block + (at + 1) * block)
                )
            times.append((time.perf_counter() - begun) / (16 * block) * 1e9)
        out[f"blocks of {block}"] = summary(times, 1)
    return {"n": n, "ns_per_id": out}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--permutations", type=int, default=200)
    parser.add_argument("--out", help="default: benchmarks/results/order.json")
    arguments = parser.parse_args(argv)
    speeds = [speed(10**9, 40), speed(10**12, 40)]
    tables = [randomness(n, arguments.permutations) for n in (4_096, 5_003, 100_000, 1_000_003)]
    # Bonferroni: so many tests are made that one p-value below 0.01 would be nothing.
    count = len(tables) * len(TESTS)
    smallest = min(test["uniform_p"] for table in tables for test in table["ours"].values())
    finish(
        "order",
        {
            "speed": speeds,
            "randomness": tables,
            "targets": {
                "ns per id at 1e9": target(
                    statistics.median(speeds[0]["ns_per_id"][f"blocks of {BLOCK}"]["values"]), 150.0
                ),
                f"smallest of {count} uniform_p": target(smallest, round(0.01 / count, 5), at_least=True),
            },
        },
        arguments.out,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
