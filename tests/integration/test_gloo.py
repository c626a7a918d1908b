"""The transport under a peer that dies in the middle of a message: whoever waits for it must be released by `abort`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PEER = Path(__file__).with_name("gloo_peer.py")
WORLD = 3


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", ["0.001", "0.004", "0.01", "0.02", "0.2"])
def test_a_message_cut_in_two_does_not_hold_anybody(tmp_path: Path, delay_s: str) -> None:
    folder = tmp_path / delay_s
    folder.mkdir()
    peers = [
        subprocess.Popen(
            [sys.executable, str(PEER), str(rank), str(WORLD), str(folder)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(WORLD)
    ]
    outputs = [peer.communicate(timeout=50)[0] for peer in peers]
    assert peers[0].returncode == -9
    for peer, output in zip(peers[1:], outputs[1:], strict=True):
        assert peer.returncode == 0
        assert float(output.split()[-1]) < 10.0, output
