"""What cannot be trained exactly is refused before, or at the moment, it would go wrong; with the reason."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from elastic_harness.errors import ConfigError, UserCodeError

SCRIPT = Path(__file__).parents[1] / "integration" / "scripts" / "refused.py"


@pytest.mark.parametrize(
    ("case", "kind", "named"),
    [
        ("lbfgs", ConfigError, "LBFGS evaluates the model several times"),
        ("complex", ConfigError, "Parameter weight is torch.complex64"),
        ("foreign-parameter", ConfigError, "1 parameters that are not the model's"),
        ("plateau", ConfigError, "ReduceLROnPlateau needs a metric"),
        ("unknown-buffer", ConfigError, "names no buffer of the model"),
        ("frozen", ConfigError, "nothing to train"),
        ("iterable", ConfigError, "give a map-style one"),
        ("empty", ConfigError, "no samples"),
        ("opaque", ConfigError, "State opaque.thing is a object"),
        ("rounding", ConfigError, "rounding.scale was float64 \\(1,\\) and is float32"),
        ("forgetful", ConfigError, "optimizer.state.0.momentum_buffer is gone"),
        ("sparse", UserCodeError, "embedding.weight has a sparse gradient"),
        ("buffer-in-place", UserCodeError, "Buffer running changed in forward"),
        ("buffer-assigned", UserCodeError, "Buffer running changed in forward"),
        ("no-backward", UserCodeError, "was not called for slot 0 of step 0"),
        ("two-backwards", UserCodeError, "twice for slot 0 of step 0"),
        ("break", UserCodeError, "step 0 was not finished"),
    ],
)
def test_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, kind: type[Exception], named: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["refused.py", case, "--run-dir", str(tmp_path / "run")])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(kind, match=named):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert not list(tmp_path.glob("run/ledger.jsonl")) or not (tmp_path / "run" / "ledger.jsonl").read_text()
