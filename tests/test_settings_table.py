"""docs/operations.md has every setting, as it is."""

from __future__ import annotations

from gemmwire_service.settings import Settings
from settings_table import PAGE, renewed, table


def test_the_table_of_settings_is_current() -> None:
    """Guards: a setting that the page lacks, or whose default it gives wrong."""
    page = PAGE.read_text()
    assert renewed(page) == page, "run ./dev python tests/settings_table.py"


def test_every_setting_is_in_it_once() -> None:
    """Guards: the test above, passing because the table is empty; a bar that ends a cell."""
    rows = table().splitlines()[2:]
    assert len(rows) == len(Settings.model_fields)
    assert all(row.count("|") == 4 for row in rows)
