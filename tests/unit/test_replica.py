"""Which members make whole replicas."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from elastic_harness.membership.replica import Columns, deal_columns, zip_rows
from elastic_harness.membership.types import Generation, Replica, node_of

NAMES = [f"{node}/w{i}" for node in ("a", "b", "c") for i in range(4)]


@st.composite
def grids(draw: st.DrawFn) -> tuple[Columns, tuple[Replica, ...]]:
    """Columns, and rows of an earlier generation: some are whole, of others members are gone or in other columns."""
    shards = draw(st.integers(1, 4))
    order = random.Random(draw(st.integers(0, 9999)))
    columns: list[list[str]] = [[] for _ in range(shards)]
    for name in order.sample(NAMES, draw(st.integers(0, len(NAMES)))):
        columns[order.randrange(shards)].append(name)
    whole = list(zip(*(order.sample(column, len(column)) for column in columns), strict=False))
    others = list(zip(*(iter(order.sample(NAMES, len(NAMES))),) * shards, strict=False))
    old_rows = [*order.sample(whole, draw(st.integers(0, len(whole)))), *others[: draw(st.integers(0, len(others)))]]
    taken: set[str] = set()
    disjoint = [row for row in old_rows if taken.isdisjoint(row) and not taken.update(row)]
    return tuple(map(tuple, columns)), tuple(order.sample(disjoint, len(disjoint)))


@given(grids())
def test_members_are_zipped_into_rows(grid: tuple[Columns, tuple[Replica, ...]]) -> None:
    columns, old_rows = grid
    rows, left_over = zip_rows(columns, old_rows)
    named = [member for row in rows for member in row] + list(left_over)
    assert sorted(named) == sorted(member for column in columns for member in column), "each is named once"
    assert all(len(row) == len(columns) for row in rows)
    assert all(member in column for row in rows for member, column in zip(row, columns, strict=True)), "in its place"
    assert len(rows) == min(map(len, columns)), "as many rows as the shortest column has members"
    whole = [row for row in old_rows if all(m in column for m, column in zip(row, columns, strict=True))]
    assert list(rows[: len(whole)]) == whole, "old rows stay, in order"
    assert zip_rows(columns, rows) == (rows, left_over), "zipped again, nothing changes"
    assert zip_rows([list(column) for column in columns], list(old_rows)) == (rows, left_over)


@given(grids())
def test_no_node_lacks_a_row_that_it_has_the_members_for(grid: tuple[Columns, tuple[Replica, ...]]) -> None:
    columns, old_rows = grid
    rows, left_over = zip_rows(columns, old_rows)
    scattered = [row for row in rows if row not in old_rows and len(set(map(node_of, row))) > 1]
    free = {*left_over, *(member for row in scattered for member in row)}
    for node in {node_of(member) for member in free}:
        assert not all(any(m in free and node_of(m) == node for m in column) for column in columns), node


@given(
    st.permutations(NAMES),
    st.integers(0, 12),
    st.integers(1, 4),
    st.dictionaries(st.sampled_from(NAMES), st.integers(0, 3)),
)
def test_columns_are_dealt(names: list[str], count: int, shards: int, told: dict[str, int]) -> None:
    members, held = names[:count], {m: shard for m, shard in told.items() if shard < shards}
    columns = deal_columns(members, held, shards)
    assert len(columns) == shards
    assert sorted(member for column in columns for member in column) == sorted(members)
    assert all(list(column) == [m for m in members if m in column] for column in columns), "in the given order"
    known = {m: held[m] for m in members if m in held}
    if set(known.values()) == set(range(shards)):
        assert all(member in columns[shard] for member, shard in known.items()), "who holds a shard keeps it"
        given = [len([m for m in column if m not in known]) for column in columns]
        lowest = min(map(len, columns))
        assert all(len(c) <= lowest + 1 for c, new in zip(columns, given, strict=True) if new), "newcomers level"
    else:
        assert max(map(len, columns)) - min(map(len, columns)) <= 1, "a lost state is no reason to lack rows"


def test_with_one_shard_every_member_is_a_row() -> None:
    columns = deal_columns(["b", "a"], {}, 1)
    assert columns == (("b", "a"),)
    assert zip_rows(columns, ()) == ((("b",), ("a",)), ())


def test_a_generation_knows_who_holds_which_shard() -> None:
    generation = Generation(1, ("a", "b", "c"), True, "test", (1, 0, 1), (("b", "a"),))
    assert generation.shard_of == {"a": 1, "b": 0, "c": 1}
    assert generation.columns == (("b",), ("a", "c")) and generation.rows == (("b", "a"),)
    alone = Generation(1, ("a", "b"), True, "test")
    assert alone.columns == (("a", "b"),) and alone.rows == (("a",), ("b",))


def test_two_broken_rows_become_one() -> None:
    """No state moves: the members that are left hold both shards."""
    before = (("a/0", "a/1"), ("b/0", "b/1"), ("c/0", "c/1"))
    rows, left_over = zip_rows([["a/0", "c/0"], ["b/1", "c/1"]], before)
    assert rows == (("c/0", "c/1"), ("a/0", "b/1")) and left_over == ()


def test_who_has_no_partner_is_left_over_and_fills_the_next_hole() -> None:
    rows, left_over = zip_rows([["a", "c", "e"], ["b", "d"]], ())
    assert rows == (("a", "b"), ("c", "d")) and left_over == ("e",)
    rows, left_over = zip_rows([["a", "e"], ["b", "d"]], rows)
    assert rows == (("a", "b"), ("e", "d")) and left_over == ()
