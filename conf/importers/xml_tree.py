"""A plain XML tree that remembers lines. Document types and entities are refused: a topology has none."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.parsers import expat

from .source import Source

_CUT = (
    expat.errors.XML_ERROR_NO_ELEMENTS,
    expat.errors.XML_ERROR_UNCLOSED_TOKEN,
    expat.errors.XML_ERROR_UNCLOSED_CDATA_SECTION,
)


@dataclass(slots=True, eq=False)
class Element:
    tag: str
    attributes: dict[str, str]
    line: int
    parent: "Element | None" = None
    children: list["Element"] = field(default_factory=list)

    def walk(self) -> Iterator["Element"]:
        """This element and all below it, in the file's order."""
        yield self
        for child in self.children:
            yield from child.walk()

    def under(self, tag: str) -> list["Element"]:
        """All elements of that tag below this one."""
        return [element for element in self.walk() if element.tag == tag and element is not self]

    def ancestors(self) -> Iterator["Element"]:
        above = self.parent
        while above is not None:
            yield above
            above = above.parent


def parse(source: Source) -> Element:
    """The root element.

    Raises:
        ValueError: Naming file and line, where the text is not XML, or ends before its elements do.
    """
    roots: list[Element] = []
    open_elements: list[Element] = []
    parser = expat.ParserCreate()

    def start(tag: str, attributes: dict[str, str]) -> None:
        above = open_elements[-1] if open_elements else None
        element = Element(tag, attributes, parser.CurrentLineNumber, above)
        if above is None:
            roots.append(element)
        else:
            above.children.append(element)
        open_elements.append(element)

    def end(_tag: str) -> None:
        open_elements.pop()

    def doctype(*_: object) -> None:
        raise source.error(
            parser.CurrentLineNumber, "declares a document type, which no topology of NCCL does"
        )

    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.StartDoctypeDeclHandler = doctype
    try:
        parser.Parse(source.text, True)
    except expat.ExpatError as err:
        if expat.ErrorString(err.code) in _CUT:
            last = open_elements[-1] if open_elements else None
            what = (
                f"<{last.tag}> of line {last.line} is never closed"
                if last
                else "it ends before its first element"
            )
            raise source.error(err.lineno, f"the file is cut off: {what}") from err
        raise source.error(err.lineno, f"is not valid XML: {expat.ErrorString(err.code)}") from err
    return roots[0]
