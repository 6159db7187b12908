"""What a report is made of: blocks in sections, the files beside the page, and the page itself."""

import base64
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from matplotlib.figure import Figure

from . import plots, show
from .show import ShownTable

PAGE = "report.html"


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a section: a paragraph, list, table, figure or code, whichever is given."""

    text: str = ""
    items: Sequence[str] = ()
    table: ShownTable | None = None
    figure_uri: str = ""
    code: str = ""
    caption: str = ""
    csv: str = ""  # file name, beside the page
    folded: bool = False  # behind a click
    wide: bool = False  # scrolls on a narrow screen instead of shrinking


@dataclass(slots=True)
class Section:
    key: str
    title: str
    short: str  # in the navigation
    blocks: list[Block] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """What a report writes (name -> content) and what it prints."""

    files: dict[str, bytes] = field(default_factory=dict)
    terminal: str = ""
    parity: dict[str, Any] | None = None

    def add_table(self, name: str, table: pd.DataFrame) -> str:
        """Keep the CSV behind a table or figure; returns its file name."""
        file = f"report_{name}.csv"
        self.files[file] = table.to_csv(index=False, lineterminator="\n").encode()
        return file

    def add_figure(self, name: str, figure: Figure) -> str:
        """Keep the PNG of a figure; returns it as a data URI."""
        png = plots.png(figure)
        self.files[f"report_{name}.png"] = png
        return "data:image/png;base64," + base64.b64encode(png).decode()


def terminal(heading: str, sentences: Sequence[str], warnings: Sequence[str], section: Section) -> str:
    """What the command prints: the summary, one section's tables and lists, the warnings."""
    lines = [heading, ""]
    lines += [_wrapped(sentence) for sentence in sentences]
    for block in section.blocks:
        if block.table is not None:
            lines += ["", show.render_text(block.table).rstrip("\n")]
        elif block.items:
            lines += ["", _wrapped(block.text), *(_wrapped(f"- {item}") for item in block.items)]
    lines += ["", *(_wrapped(f"warning: {item}") for item in warnings)] if warnings else []
    return "\n".join(lines) + "\n"


def _wrapped(sentence: str) -> str:
    return textwrap.fill(sentence, 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def html(
    heading: str, sentences: Sequence[str], chips: Sequence[tuple[str, str]], sections: Sequence[Section]
) -> bytes:
    """The page.

    Args:
        chips: (text, tone) of the marks on top; tones are `good`, `bad` and `plain`.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    template = environment.get_template("report.html.j2")
    return template.render(heading=heading, sentences=sentences, chips=chips, sections=sections).encode()
