"""docs/keys.md says what the schema says."""

from collections.abc import Callable
from pathlib import Path

import pytest

from twinbed.conf.reference import page, rows

PAGE = Path(__file__).resolve().parents[2] / "docs" / "keys.md"


def test_the_page_is_up_to_date(same_as_golden: Callable[[Path, str], None]) -> None:
    same_as_golden(PAGE, page())


def test_every_key_has_a_meaning() -> None:
    assert [row.key for row in rows() if not row.meaning] == [], "say it beside the field in conf/schema/"


@pytest.mark.parametrize(
    ("key", "default", "unit", "part"),
    [
        ("cluster.inter_node.bandwidth_Bps", "`1.25e7`", "bytes a second", "of one link, in each direction"),
        ("cluster.nodes", "-", "", "number of nodes"),
        ("cluster.device.launch_ns", "`0`", "nanoseconds, a whole number", "one kernel"),
        ("comm.hpz_lifetime", "`null`", "", "how long the node copy"),
        ("deepspeed.node_copy", "`null`", "", "as the release does"),  # a comment above the field
    ],
)
def test_rows_are_read_from_the_schema(key: str, default: str, unit: str, part: str) -> None:
    row = next(row for row in rows() if row.key == key)
    assert (row.default, row.unit) == (default, unit)
    assert part in row.meaning


def test_legal_values_are_listed_with_what_they_mean() -> None:
    row = next(row for row in rows() if row.key == "comm.gradient_path")
    assert "`two_hop` (qgZ: all-to-all in the node, then across nodes)" in row.legal
