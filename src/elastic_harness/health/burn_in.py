"""What the workers of a burn-in told, and what is wrong with it. Pure."""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_harness.errors import EXIT_INFRASTRUCTURE, EXIT_OTHER_BITS, EXIT_SUCCESS


@dataclass
class BurnInReport:
    """What one worker told."""

    name: str
    device: str = ""
    pid: int = 0
    torch: str = ""
    hashes: tuple[str, ...] = ()  # of the slots, the first time
    rounds: int = 0
    slot_s: list[float] = field(default_factory=list)
    others: list[tuple[int, int, str]] = field(default_factory=list)  # round, slot, hash: not those of the first time
    damage: list[tuple[int, int, int]] = field(default_factory=list)  # round, bytes, the first one's place
    ended: str = ""  # why it ended before its time

    @property
    def who(self) -> str:
        return f"{self.name} on {self.device or 'no device yet'}"

    def include(self, told: Mapping[str, Any]) -> None:
        """Add a line that the worker wrote."""
        if "pid" in told:
            self.pid, self.device, self.torch = told["pid"], told["device"], told["torch"]
            return
        self.hashes = tuple(told.get("hashes", self.hashes))
        self.rounds += 1
        self.slot_s += told["slot_s"]
        self.others += [(told["round"], int(slot), each) for slot, each in told["others"].items()]
        if told["damage"] is not None:
            self.damage.append((told["round"], *told["damage"]))

    def slots_per_s(self) -> tuple[float, float, float]:
        """Return the median, and below and above which one in twenty is."""
        cuts = statistics.quantiles([1 / each for each in self.slot_s], n=20, method="inclusive")
        return cuts[9], cuts[0], cuts[18]


@dataclass(frozen=True)
class BurnInVerdict:
    """What is wrong, in sentences. wrong: bits. broken: workers that did not get to the end."""

    wrong: tuple[str, ...]
    broken: tuple[str, ...]
    hash: str  # of all slots, if there is one that all workers had

    @property
    def exit_code(self) -> int:
        if self.wrong:
            return EXIT_OTHER_BITS
        return EXIT_INFRASTRUCTURE if self.broken else EXIT_SUCCESS


def judge(reports: Sequence[BurnInReport]) -> BurnInVerdict:
    """Return what is wrong. A worker is compared with itself, and with the majority of all. Pure."""
    wrong, broken = [], []
    for report in reports:
        if report.ended:
            broken.append(f"{report.who} {report.ended}, after {report.rounds} rounds")
        if report.others:
            at, slot, other = report.others[0]
            wrong.append(
                f"{report.who} computed {len(report.others)} of {len(report.slot_s)} slots otherwise than the first "
                f"time; slot {slot} in round {at} gave {other}, before {report.hashes[slot]}"
            )
        if report.damage:
            at, nbytes, place = report.damage[0]
            wrong.append(
                f"{report.who} found memory changed in {len(report.damage)} of {report.rounds} rounds; {nbytes} bytes "
                f"in round {at}, the first at {place}"
            )
    begun = [report for report in reports if report.hashes]
    common, having = Counter(report.hashes for report in begun).most_common(1)[0] if begun else ((), 0)
    odd = [report for report in begun if report.hashes != common]
    if odd and 2 * having > len(begun):
        wrong += [f"{report.who} computed other bits than most workers, from its first round on" for report in odd]
    elif odd:
        wrong.append(
            f"the workers computed different bits from their first round on, and no majority agrees: "
            f"{', '.join(report.who for report in begun)}. Test with more workers, or on another machine"
        )
    agreed = "" if odd or not begun else hashlib.sha256(" ".join(common).encode()).hexdigest()[:16]
    return BurnInVerdict(tuple(wrong), tuple(broken), agreed)
