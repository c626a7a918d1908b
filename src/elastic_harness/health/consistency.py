"""Says which ranks hold another state than the others, by majority. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SHOWN_MAX = 5  # differences in a text
LACKS = "nothing"  # what a rank holds under a name that it does not have


@dataclass(frozen=True)
class Difference:
    """A tensor or a plain value that is not the same on all ranks."""

    name: str
    sides: tuple[tuple[str, tuple[int, ...]], ...]  # a value (of a tensor its hash), and who holds it; most ranks first

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that differ from the majority; none if there is no majority."""
        (_, most), *others = self.sides
        rest = sorted(rank for _, ranks in others for rank in ranks)
        return tuple(rest) if len(most) > len(rest) else ()

    def __str__(self) -> str:
        held = "; ".join(f"{_ranks(ranks)}: {value}" for value, ranks in self.sides)
        who = f"differs on {_ranks(self.ranks)}" if self.ranks else "differs, undecided who is right"
        return f"{self.name} {who} ({held})"


@dataclass(frozen=True)
class ConsistencyReport:
    """What a comparison of all ranks' states found. The same on all ranks."""

    differences: tuple[Difference, ...]
    compared_bytes: int  # of tensors, on each rank
    left_out: tuple[str, ...] = ()  # tensors of which every rank holds another part

    @property
    def ok(self) -> bool:
        """Whether all ranks hold the same, bit for bit, as far as it was compared."""
        return not self.differences

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that differ from a majority in something."""
        return tuple(sorted({rank for difference in self.differences for rank in difference.ranks}))

    @property
    def undecided(self) -> bool:
        """Whether something differs for which there is no majority."""
        return any(not difference.ranks for difference in self.differences)

    def __str__(self) -> str:
        if self.ok:
            return f"all ranks hold the same {self.compared_bytes:,} bytes"
        more = len(self.differences) - SHOWN_MAX
        shown = "\n  ".join(map(str, self.differences[:SHOWN_MAX])) + (f"\n  and {more} more" if more > 0 else "")
        who = _ranks(self.ranks) if self.ranks else "undecided which"
        return f"states differ, {who}:\n  {shown}"


def compare(tables: Mapping[int, Mapping[str, str]]) -> tuple[Difference, ...]:
    """Return the names under which these ranks do not all hold the same, in order. tables: what each rank holds."""
    names = sorted({name for table in tables.values() for name in table})
    sides = ((name, _sides({rank: table.get(name, LACKS) for rank, table in tables.items()})) for name in names)
    return tuple(Difference(name, each) for name, each in sides if len(each) > 1)


def _sides(held: Mapping[int, str]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    values: dict[str, list[int]] = {}
    for rank in sorted(held):
        values.setdefault(held[rank], []).append(rank)
    return tuple(sorted(((v, tuple(ranks)) for v, ranks in values.items()), key=lambda side: (-len(side[1]), side[1])))


def _ranks(ranks: Sequence[int]) -> str:
    named = list(map(str, ranks))
    return f"rank {named[0]}" if len(named) == 1 else f"ranks {', '.join(named[:-1])} and {named[-1]}"
