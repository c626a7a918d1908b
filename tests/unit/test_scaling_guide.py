"""The figures in docs/scaling.md are what the code gives."""

from __future__ import annotations

import doctest
import re
import warnings
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "scaling.md"


def test_the_figures_of_the_guide() -> None:
    blocks = [b for b in re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.M | re.S) if b.startswith(">>>")]
    session = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, GUIDE.name, str(GUIDE), 0)
    assert len(session.examples) > 20
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of", UserWarning)  # torch's, of steps without gradients
        assert doctest.DocTestRunner().run(session).failed == 0
