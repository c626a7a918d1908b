"""Plan after plan of chaos on four workers, each from the next seed, for SOAK_MINUTES (default 2). The seed is printed;
SOAK_SEED repeats it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from elastic_harness.commands import chaos

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]


@pytest.mark.parametrize("spares", [0, 1])
def test_chaos(tmp_path: Path, spares: int, capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(os.environ.get("SOAK_SEED") or time.time_ns() % 2**31) + spares
    minutes = float(os.environ.get("SOAK_MINUTES") or 2) / 2
    with capsys.disabled():
        print(f"\nchaos: SOAK_SEED={seed - spares}, spares={spares}")
        given = ["--seed", str(seed), "--minutes", str(minutes), "--workers", "4", "--spares", str(spares)]
        code = chaos.main(["run", *given, "--faults", "12", "--output", str(tmp_path / "chaos")])
    facts = json.loads((tmp_path / "chaos" / "chaos.json").read_text())
    assert code == 0 and facts["ok"] and facts["recoveries_s"]["count"] > 0, facts
