from __future__ import annotations

import pytest

from tools.make_readme_tables import Support, fill, main, support_table


def test_the_readme_is_up_to_date() -> None:
    assert main(["--check"]) == 0


def test_a_table_replaces_what_stood_between_its_markers() -> None:
    text = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb <!-- begin y --><!-- end y -->\n"
    assert fill(text, "x", r"| new \1 |") == text.replace("old", r"| new \1 |")


@pytest.mark.parametrize("text", ["", "<!-- begin x -->", "<!-- begin x --><!-- end x -->" * 2])
def test_missing_or_repeated_markers_are_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="must stand there once"):
        fill(text, "x", "")


def test_a_yes_names_a_test_that_exists() -> None:
    here = "tests/unit/tools/test_make_readme_tables.py"
    assert support_table([Support("a", "b", "yes", here)]).splitlines()[2] == f"| a | b | yes | `{here}` |"
    for note in ("", "README.md", "tests/none.py"):
        with pytest.raises(ValueError, match="needs the path of a test"):
            support_table([Support("a", "b", "yes", note)])
    with pytest.raises(ValueError, match="must be yes, no or untested"):
        support_table([Support("a", "b", "maybe", "")])
