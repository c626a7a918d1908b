"""ConsistencyChecker: the verdict as a pure function, and real process groups whose ranks differ by a bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_harness.health.consistency import LACKS, ConsistencyReport, compare
from unit import consistent_job
from unit.ranks import Rank

tables = st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from("xyz")), min_size=1, max_size=7)


@given(tables)
def test_a_rank_is_named_if_and_only_if_most_others_agree_against_it(held: list[dict[str, str]]) -> None:
    found = {each.name: each for each in compare(dict(enumerate(held)))}
    for name in "abc":
        values = [table.get(name, LACKS) for table in held]
        assert (name in found) == (len(set(values)) > 1)
        if name in found:
            most = [value for value in values if values.count(value) * 2 > len(values)]
            expected = tuple(rank for rank, value in enumerate(values) if most and value != most[0])
            assert found[name].ranks == expected
            assert sorted(rank for _, ranks in found[name].sides for rank in ranks) == list(range(len(held)))


@given(tables, st.randoms())
def test_the_verdict_does_not_depend_on_the_order_of_ranks(held: list[dict[str, str]], random: Any) -> None:
    items = list(enumerate(held))
    random.shuffle(items)
    assert compare(dict(items)) == compare(dict(enumerate(held)))


def test_a_report_in_words() -> None:
    held = [{"a": "1"}, {"a": "1"}, {"a": "2"}]
    decided = ConsistencyReport(compare(dict(enumerate(held))), 10)
    assert str(decided) == "states differ, rank 2:\n  a differs on rank 2 (ranks 0 and 1: 1; rank 2: 2)"
    assert not decided.ok and decided.ranks == (2,) and not decided.undecided
    tie = ConsistencyReport(compare({4: {"a": "1"}, 6: {}}), 10)
    assert tie.undecided and tie.ranks == ()
    assert (
        str(tie) == "states differ, undecided which:\n  a differs, undecided who is right (rank 4: 1; rank 6: nothing)"
    )
    many = ConsistencyReport(compare({0: dict.fromkeys("abcdefgh", "1"), 1: {}, 2: {}}), 10)
    assert str(many).endswith("\n  and 3 more")
    assert str(ConsistencyReport((), 1234)) == "all ranks hold the same 1,234 bytes"


def ranks_say(main: Any, world: int, folder: Path) -> list[dict[str, Any]]:
    ranks = [Rank(main, rank, world, str(folder)) for rank in range(world)]
    said = [rank.said() for rank in ranks]
    assert [rank.end() for rank in ranks] == [0] * world
    return said


@pytest.mark.slow
def test_ranks_that_differ_are_named_with_their_tensors(tmp_path: Path) -> None:
    said = ranks_say(consistent_job.compare, 4, tmp_path)
    pairs = [each.pop("pair") for each in said if "pair" in each]
    assert said == said[:1] * 4, "all ranks come to the same"
    first = said[0]
    assert first["same"]["ok"] and first["same"]["compared_bytes"] > 7000
    flipped = [["model.2.weight", [2]], ["optimizer.state.1.exp_avg", [2]]]
    assert first["bits"]["names"] == flipped and first["bits"]["ranks"] == [2]
    assert sorted(name for names in first["parts"] for name in names) == flipped, "each in one of the parts"
    assert sum(bool(names) for names in first["parts"]) == 2
    assert first["tie"]["names"] == [["optimizer.param_groups.0.lr", []]] and not first["tie"]["ok"]
    assert "ranks 0 and 2: 0.01; ranks 1 and 3: 0.51" in first["tie"]["text"]
    assert first["batch norm"]["names"] == [["model.1.running_mean", []]]
    assert first["ignored"]["ok"]
    assert "ignore='*.runing_*' fits no name of the state" in first["typo"]["error"]
    assert first["layout"]["names"] == [["model.2.bias", [1]], ["model.2.weight", [1]]]
    assert "rank 1: float32 [5, 32]" in first["layout"]["text"]
    assert "rank 3 part 2 of 8" in first["steps"]["error"]
    assert first["unreadable"]["error"].startswith("Rank 3 cannot take part: State s.v is a object")
    assert [pair["names"] for pair in pairs] == [[["state.t", []]]] * 2 and "rank 3: " in pairs[0]["text"]
    assert first["stops"] == [False, True]


@pytest.mark.slow
def test_ranks_are_made_equal(tmp_path: Path) -> None:
    said = ranks_say(consistent_job.make_equal, 3, tmp_path)
    assert [each["before"] for each in said] == [False] * 3
    assert [(each["after"], each["kept"]) for each in said] == [(True, False), (True, True), (True, False)], said


@pytest.mark.slow
def test_of_sharded_state_replicas_are_compared(tmp_path: Path) -> None:
    said = ranks_say(consistent_job.sharded, 4, tmp_path)
    for rank, each in enumerate(said):
        assert "0.bias is sharded, as all others are" in each["full"]["error"]
        assert "0.weight is a DTensor" in each["model"] and "give grad_norm= in place of model=" in each["model"]
        assert "give grad_norm.full_tensor()" in each["grad_norm"]
        assert each["partly"]["ok"] and each["partly"]["compared_bytes"] == 8
        assert each["partly"]["left_out"] == [f"model.{name}" for name in ("0.bias", "0.weight", "1.bias", "1.weight")]
        assert each["hybrid"]["ok"] and not each["hybrid"]["left_out"]
        assert each["flipped"]["ok"] == (rank in (0, 2))
    assert said[1]["flipped"] == said[3]["flipped"] and said[1]["flipped"]["names"] == [["model.1.weight", []]]
