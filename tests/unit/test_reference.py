"""What is made from the code is up to date, and says something of every setting."""

from __future__ import annotations

import re

from scripts.make_reference import SETTINGS, _comments, made

from elastic_harness.config import load_config
from elastic_harness.gpt.config import TrainerConfig


def test_the_files_are_those_that_the_code_makes() -> None:
    stale = [path.name for path, text in made().items() if path.read_text() != text]
    assert not stale, f"{stale}: run make reference"


def test_all_settings_in_the_file_are_the_defaults() -> None:
    assert load_config(TrainerConfig, SETTINGS) == TrainerConfig()


def test_every_setting_is_explained() -> None:
    """A line that has nothing but the type in brackets says nothing."""
    text = SETTINGS.read_text()
    unexplained = re.findall(r"^ *# \([^)]*\)\n *(\w+):", text, re.M)
    assert not unexplained


def test_comments_beside_and_above_a_field_are_found() -> None:
    source = '''
class A:
    """A # in a docstring."""

    one: int = 1  # the first
    # of both, …
    two: str = "# none"  # … the second
    three: int = 3

    def four(self):
        pass  # no field
'''
    assert _comments(source) == {"one": "the first", "two": "of both, … … the second", "three": ""}
