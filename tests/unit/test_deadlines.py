"""How long a phase may take: learned from measured times, and from what did not finish in time."""

from __future__ import annotations

from elastic_harness.config import ElasticConfig
from elastic_harness.contract.board import Board, Phase
from elastic_harness.train.deadlines import Deadlines

CONFIG = ElasticConfig(
    progress_timeout_factor=8, progress_timeout_min_s=2, progress_timeout_max_s=100, first_step_timeout_s=60
)


def test_a_phase_has_a_multiple_of_its_slowest_recent_duration_within_bounds() -> None:
    deadlines = Deadlines(CONFIG, Board(None))
    assert deadlines.limit_s(Phase.SLOT, 0) == 60, "nothing was measured"
    for seconds, limit_s in ((0.01, 2), (5, 40), (0.01, 36), (50, 100)):
        deadlines.observe(Phase.SLOT, seconds)
        assert deadlines.limit_s(Phase.SLOT, 0) == limit_s
    assert deadlines.limit_s(Phase.APPLY, 0) == 60, "every phase has its own"


def test_in_a_step_whose_work_was_not_finished_in_time_each_try_has_longer() -> None:
    deadlines, tries = Deadlines(CONFIG, Board(None)), []
    deadlines.observe(Phase.SLOT, 0.01)
    for _ in range(4):
        tries.append(deadlines.limit_s(Phase.SLOT, 7))
        deadlines.heed_overdue([(7, tries[-1])])
    assert tries == [2, 16, 100, 100]
    assert deadlines.limit_s(Phase.SLOT, 8) == 2, "only there"
    deadlines.heed_overdue([])
    assert deadlines.limit_s(Phase.SLOT, 7) == 2


def test_a_worker_that_has_measured_nothing_never_has_less_than_for_its_first_step() -> None:
    deadlines = Deadlines(CONFIG, Board(None))
    deadlines.heed_overdue([(7, 2.0)])
    assert deadlines.limit_s(Phase.SLOT, 7) == 60
    deadlines.heed_overdue([(7, 10.0)])
    assert deadlines.limit_s(Phase.SLOT, 7) == 80
