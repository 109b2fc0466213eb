"""The README's tables of what is served are those that the tests prove. Not here: making them."""

import re
from pathlib import Path

from tests.model_runner.test_every_target import CELLS, FAMILIES, LACKS, PARTS
from tests.readme_table import NAMES, TESTS, adapter_table, format_table, peft_cells

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_tables_are_as_the_tests_are() -> None:
    for table in (adapter_table(), format_table()):
        assert table in README, f"the README must have (python -m tests.readme_table):\n{table}"


def test_every_word_of_a_cell_is_explained_by_a_test_that_exists() -> None:
    for word, test in TESTS.items():
        path = Path(test.__code__.co_filename).relative_to(ROOT)
        line = f"- {word}: `{test.__name__}` in [{path}]({path})"
        assert line in README, line
    cells = [c.strip() for row in adapter_table().splitlines()[2:] for c in row.split("|")[2:-1]]
    cells += [c.strip() for row in format_table().splitlines()[2:] for c in row.split("|")[2:-1]]
    words = {re.sub(r" `.*`$", "", cell) for cell in cells}
    assert words <= {*TESTS, "refused:", "no experts"}, words


def test_no_family_and_no_part_is_missing() -> None:
    assert set(NAMES) == set(FAMILIES)
    absent = {(family, part) for family in FAMILIES for part in LACKS[family]}
    assert set(CELLS) | absent == {(family, part) for family in FAMILIES for part in PARTS}
    assert set(peft_cells()) <= set(CELLS)
