"""The report: sections of prose, tables and figures in one HTML file that loads nothing else."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from matplotlib.figure import Figure

from bench.cost.published import Comparison, Number
from bench.pictures import svg


@dataclass
class Section:
    """One heading of the report, in the order its parts were added. ``data`` holds the numbers as JSON takes them."""

    title: str
    paper: str
    parts: list[str] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)
    data: dict[str, object] = field(default_factory=dict)

    def text(self, paragraph: str) -> None:
        self.parts.append(f"<p>{escape(paragraph)}</p>")

    def table(self, caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        columns = zip(head, *(kept := list(rows)), strict=True)
        kinds = [" class=prose" if any(len(value) > _SENTENCE for value in column) else "" for column in columns]

        def line(tag: str, values: Sequence[str]) -> str:
            cells = (f"<{tag}{kind}>{escape(value)}</{tag}>" for kind, value in zip(kinds, values, strict=True))
            return f"<tr>{''.join(cells)}</tr>"

        body = "".join(line("td", row) for row in kept)
        self.parts.append(
            f"<div class=wide><table><caption>{escape(caption)}</caption><thead>{line('th', head)}</thead>"
            f"<tbody>{body}</tbody></table></div>"
        )

    def compare(self, caption: str, rows: Sequence[Comparison]) -> None:
        self.table(
            caption,
            ("quantity", "unit", "published", "ours", "ratio", "where they differ", "published in"),
            (
                (r.what, r.unit, show(r.published), show(r.ours), r.ratio, "" if r.agrees else r.why, r.source)
                for r in rows
            ),
        )
        self.data[caption] = [
            {"what": r.what, "unit": r.unit, "published": r.published, "ours": r.ours, "ratio": r.ratio} for r in rows
        ]

    def figure(self, name: str, caption: str, drawing: Figure) -> None:
        """Add a figure under ``name``, its file name if figures are written one by one."""
        self.figures[name] = drawing
        image = svg(drawing, name)
        self.parts.append(f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>")


def show(number: Number) -> str:
    """Three digits of a number, or of both ends of a band."""
    if isinstance(number, tuple):
        return f"{show(number[0])} to {show(number[1])}"
    if number and abs(number) >= 1000:
        return f"{number:,.0f}".replace(",", "\u202f")
    return f"{number:.3g}"


def html(title: str, introduction: Sequence[str], sections: Sequence[Section]) -> str:
    links = "".join(f'<li><a href="#s{i}">{escape(one.title)}</a></li>' for i, one in enumerate(sections))
    bodies = "".join(
        f'<section id="s{i}"><h2>{escape(one.title)}</h2><p class=paper>{escape(one.paper)}</p>{"".join(one.parts)}'
        "</section>"
        for i, one in enumerate(sections)
    )
    paragraphs = "".join(f"<p>{escape(text)}</p>" for text in introduction)
    return (
        f'<!doctype html><html lang=en><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body><main>'
        f"<h1>{escape(title)}</h1>{paragraphs}<ul>{links}</ul>{bodies}</main></body></html>\n"
    )


_SENTENCE = 24
"""Columns with longer cells hold prose."""


_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --back: #fff; --soft: #667; --line: #d5d9de; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e6ea; --back: #14171b; --soft: #9aa3ad; --line: #353b43; } }
body { margin: 0; background: var(--back); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 62rem; margin: auto; padding: 2rem 1rem 4rem; }
h1 { line-height: 1.2; } h2 { margin: 3rem 0 0; }
a { color: inherit; }
.paper, figcaption, caption { color: var(--soft); font-size: .9rem; } .paper { margin: .2rem 0 1rem; }
caption { text-align: left; padding: .4rem 0; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th:first-child, td:first-child, .prose { text-align: left; } .prose { min-width: 11rem; }
td:not(.prose) { white-space: nowrap; }
th { font-weight: 600; }
figure { margin: 1.5rem 0; } svg { max-width: 100%; height: auto; color: var(--ink); }
"""
