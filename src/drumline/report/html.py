"""Building HTML so that text stays text: only what is marked as `Html` goes in as it is."""

from html import escape


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def fragment(*children: str) -> Html:
    """Puts children one after another.

    Args:
        *children: HTML, or text that is escaped.

    Returns:
        HTML.
    """
    return Html("".join(child if isinstance(child, Html) else escape(child) for child in children))


def element(tag: str, *children: str, **attributes: str) -> Html:
    """An element.

    Args:
        tag: its name.
        *children: HTML, or text that is escaped.
        **attributes: of the element; a trailing underscore is dropped (`class_`), others become hyphens (`data_run`).

    Returns:
        HTML.
    """
    written = "".join(f' {name.rstrip("_").replace("_", "-")}="{escape(value)}"' for name, value in attributes.items())
    return Html(f"<{tag}{written}>{fragment(*children)}</{tag}>")


def table(header: list[str], rows: list[list[str]], class_: str = "") -> Html:
    """A table.

    Args:
        header: names of the columns; empty: no header.
        rows: a list of cells each.
        class_: of the element.

    Returns:
        HTML, in a box that scrolls by itself where it is too wide.
    """
    top = element("thead", element("tr", *(element("th", cell, scope="col") for cell in header))) if header else ""
    body = element("tbody", *(element("tr", *(element("td", cell) for cell in row)) for row in rows))
    return element("div", element("table", top, body, class_=class_), class_="scroll")
