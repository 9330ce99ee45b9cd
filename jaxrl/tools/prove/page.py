"""Write the HTML page of a proof, which holds all that it shows: no script, nothing fetched."""

import html as escape
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

PARTS = ("mfu", "share_of_bound", "tokens_in_rows")  # columns that are shares of 1, in percent
BARS = (*PARTS, "reward", "held_out")  # shown with a bar of their length
TITLES = {  # of the sections, for who does not know jaxrl
    "machine": "What this machine is, and what it reaches",
    "doctor": "Gradients, masks and sampler are right",
    "kernels": "Kernels against their plain references",
    "update": "Speed of the update and of the head (MFU)",
    "memory": "Memory of the update against the plan",
    "decode": "Decode steps against the bandwidth bound",
    "sync": "New weights for the sampler",
    "quickstart": "The quickstart learns",
    "resume": "Killed and resumed, bit for bit",
}


def html(proof: Mapping[str, Any], waiting: Sequence[str] = ()) -> str:
    """Return the page.

    Args:
        proof: as in proof.json.
        waiting: sections that are not done yet.
    """
    sections = proof["sections"]
    verdicts = [section["verdict"] for section in sections.values()]
    summary = ", ".join(f"{verdicts.count(x)} {x}" for x in ("passed", "skipped", "FAILED"))
    if left_out := verdicts.count("left out"):
        summary += f", {left_out} left out: the same command goes on with them"
    if waiting:
        summary += f", {len(waiting)} to come"
    body = "".join(_section(name, section) for name, section in sections.items())
    filled = {
        "style": _file("proof.css"),
        "machine": escape.escape(sections["machine"]["figure"]),
        "about": escape.escape(
            f"jaxrl {proof['jaxrl']}, the {proof['mode']} proof, {proof['made']}: {summary}"
        ),
        "lines": "".join(_line(name, section) for name, section in sections.items()),
        "sections": body,
    }
    text = _file("proof.html")
    for name, value in filled.items():
        before, after = text.split(f"{{{{{name}}}}}")
        text = before + value + after
    return text


def _line(name: str, section: Mapping[str, Any]) -> str:
    said = "; ".join(x for x in (section["figure"], section["reason"]) if x)
    return (
        f'<li><a href="#{name}">{name}</a> {_verdict(section)} '
        f"<span>{escape.escape(said)}</span></li>\n"
    )


def _verdict(section: Mapping[str, Any]) -> str:
    verdict = section["verdict"]
    return f'<b class="{verdict.lower()}">{verdict}</b>'


def _section(name: str, section: Mapping[str, Any]) -> str:
    parts = [f'<section id="{name}"><h2>{TITLES[name]} {_verdict(section)}</h2>']
    parts.append(f'<p class="faint">{name}, {section["seconds"]:.0f} s</p>')
    for text in (section["figure"], section["reason"]):
        if text:
            parts.append(f"<p>{escape.escape(text)}</p>")
    if section["missing"]:
        said = "".join(f"<li>{escape.escape(x)}</li>" for x in section["missing"])
        parts.append(f'<p>Cannot be had here:</p><ul class="notes">{said}</ul>')
    parts.append(_table(section["rows"]))
    return "\n".join((*parts, "</section>\n"))


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a column for every name that a row has."""
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row))
    kinds = {
        name: ' class="number"'
        if all(_is_number(row[name]) for row in rows if row.get(name) is not None)
        else ""
        for name in names
    }
    head = "".join(f"<th{kinds[x]}>{escape.escape(x.replace('_', ' '))}</th>" for x in names)
    lines = "".join(
        "<tr>" + "".join(f"<td{kinds[x]}>{_cell(x, row.get(x))}</td>" for x in names) + "</tr>\n"
        for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>\n{lines}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def _cell(name: str, value: Any) -> str:
    text = escape.escape(shown(name, value))
    if name not in BARS or not _is_number(value):
        return text
    width = 100 * min(max(value, 0), 1)
    return f'{text}<i style="width:{width:.1f}%"></i>'


def shown(name: str, value: Any) -> str:
    """Return a value of a column as text: four digits, shares in percent."""
    if value is None:
        return ""
    if not _is_number(value):
        return " ".join(shown(name, x) for x in value) if isinstance(value, list) else str(value)
    if name in PARTS:
        return f"{100 * value:.1f} %"
    if isinstance(value, int) or (abs(value) >= 1000 and value < 1e15):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _file(name: str) -> str:
    return resources.files("jaxrl.tools.prove").joinpath(name).read_text(encoding="utf-8")
