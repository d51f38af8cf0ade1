"""What every HTML page of this project is made of: one style, and the pieces they share.

A page is one file: no script, nothing fetched, which its own content policy enforces. Texts are escaped
by whoever puts them in (`esc`); pieces here escape what they are given.
"""

import html
from collections.abc import Iterable, Sequence

STYLE = """
:root { color-scheme: light dark; --page: #f7f8fa; --card: #fff; --ink: #1d2430; --dim: #5d6778;
  --line: #dde2ea; --warn: #fff4dc; --series-1: #2f6fde; --series-2: #d8700c; --series-3: #16876f;
  --series-4: #8a55c9; --series-5: #8b929e; }
@media (prefers-color-scheme: dark) { :root { --page: #12151b; --card: #1a1f28; --ink: #e4e8ef;
  --dim: #9aa5b5; --line: #333c4a; --warn: #3a3018; --series-1: #6ea0ff; --series-2: #f29a45;
  --series-3: #3fbf9f; --series-4: #b78cf0; --series-5: #8b929e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 28px 24px 60px; max-width: 1280px; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }
h1 { margin: 0 0 4px; font-size: 26px; overflow-wrap: anywhere; }
h2 { margin: 36px 0 12px; font-size: 19px; }
h3 { margin: 0 0 6px; font-size: 15px; }
.lead { margin: 0 0 20px; max-width: 100ch; color: var(--dim); }
.problems { margin: 0 0 20px; padding: 10px 16px 10px 34px; background: var(--warn);
  border-radius: 8px; }
.tiles { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(188px, 1fr)); }
.plots { display: grid; gap: 16px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); }
.tiles div, figure, article, details, .wide { background: var(--card);
  border: 1px solid var(--line); border-radius: 10px; }
.tiles div { padding: 12px 14px; font-size: 14px; }
.tiles b { display: block; font-size: 21px; line-height: 1.4; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.tiles small, figcaption { color: var(--dim); font-size: 13px; }
figure { margin: 0; padding: 14px 16px; display: flex; flex-direction: column; }
figure svg { width: 100%; height: auto; }
figure svg text { font-family: inherit !important; }
figcaption { margin-top: auto; padding-top: 8px; }
.empty { margin: auto; padding: 40px 0; color: var(--dim); font-style: italic; text-align: center; }
.wide { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 8px 14px; text-align: right; white-space: nowrap; }
th { font-weight: 600; } th:first-child { text-align: left; }
thead th { color: var(--dim); font-size: 13px; }
tbody tr { border-top: 1px solid var(--line); }
article { margin: 0 0 12px; padding: 12px 16px; }
article header { display: flex; flex-wrap: wrap; gap: 4px 18px; color: var(--dim); font-size: 13px; }
pre { margin: 8px 0 0; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 26em;
  overflow-y: auto; font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; }
details { margin: 0 0 12px; padding: 10px 16px; } summary { cursor: pointer; font-weight: 600; }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def esc(value: object) -> str:
    """Text as HTML, also inside attributes."""
    return html.escape(str(value), quote=True)


def document(title: str, body: Iterable[str], style: str = "") -> str:
    """A whole page; `style` is added to the common one."""
    return "\n".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            f"<title>{esc(title)}</title><style>{STYLE}{style}</style></head><body>",
            *body,
            "</body></html>",
        )
    )


def problems(sentences: Sequence[str]) -> str:
    """What is wrong, one line each; nothing where nothing is."""
    items = "".join(f"<li>{esc(sentence)}</li>" for sentence in sentences)
    return f'<ul class="problems">{items}</ul>' if items else ""


def tiles(numbers: Iterable[tuple[str, str, str]]) -> str:
    """(label, value, note) of each key number."""
    body = "".join(
        f"<div>{esc(label)}<b>{esc(value)}</b><small>{esc(note)}</small></div>"
        for label, value, note in numbers
    )
    return f'<section class="tiles">{body}</section>'


def table(headings: str, rows: str) -> str:
    """A table that scrolls sideways, from the cells of its heading and its rows."""
    head = f"<thead><tr>{headings}</tr></thead>"
    return f'<div class="wide"><table>{head}<tbody>{rows}</tbody></table></div>'


def details(title: str, text: str | None, *, shown: bool = False) -> str:
    """Text as it is, folded unless `shown`; None says that there is none."""
    body = '<p class="empty">no data</p>' if text is None else f"<pre>{esc(text)}</pre>"
    return f"<details{' open' if shown else ''}><summary>{esc(title)}</summary>{body}</details>"
