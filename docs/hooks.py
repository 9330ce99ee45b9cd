"""MkDocs hook: pages for what lies outside of docs/ and is linked to.

On GitHub `../jaxrl/losses/kl.py` opens the file. In the site it opens `source/jaxrl/losses/kl.py`,
a page that is made here: of Markdown its text, of a notebook its cells, of another file a listing,
of a folder its README or its files. What such a page links to gets one, too. A link that leads
nowhere is left as it is, and the strict build refuses it.
"""

import json
import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
# code, where nothing is a link; or a relative link
PATTERN = re.compile(
    r"(?P<code>^ *(?P<fence>`{3,}).*?^ *(?P=fence)`*|(?P<tick>`+)(?!`).+?(?<!`)(?P=tick)(?!`))"
    r"|(?<=\]\()(?![a-z]+:|[#/])(?P<to>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))",
    re.MULTILINE | re.DOTALL,
)
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".toml": "toml"}
WIDE = (  # tables that need the whole window
    "configuration.md",
    "environments.md",
    "migrating_from_skyrl.md",
    "migrating_from_verl_and_trl.md",
    "recipes.md",
    "tool_use.md",
)
PATHS: dict[str, str] = {}  # page below source/ -> what it shows, from the root of the repository


def page_of(path: str) -> str | None:
    """The page that shows a file or folder of the repository; None where there is none."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/") if (ROOT / path).is_file() else None
    if (ROOT / path).is_dir():
        readme = (ROOT / path / "README.md").is_file()
        return f"source/{path}/{'README' if readme else 'index'}.md"
    if not (ROOT / path).is_file():
        return None
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def targets(markdown: str, path: str) -> list[str]:
    """What the text of the file `path` links to, from the root of the repository."""
    found = (match["to"] for match in PATTERN.finditer(markdown) if match["to"])
    return [_resolve(path, to) for to in found]


def rewrite(markdown: str, path: str, uri: str) -> str:
    """The text of the file `path` for its page `uri`: every relative link leads to a page."""

    def link(match: re.Match) -> str:
        page = page_of(_resolve(path, match["to"])) if match["to"] else None
        if page is None:
            return match[0]
        return posixpath.relpath(page, posixpath.dirname(uri) or ".") + (match["anchor"] or "")

    return PATTERN.sub(link, markdown)


def text_of(path: str) -> str:
    """Markdown that shows a file or folder of the repository."""
    place = ROOT / path
    if place.is_dir():
        names = sorted(x.name for x in place.iterdir() if not x.name.startswith(("_", ".")))
        return f"# {path}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)
    text = place.read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    if path.endswith(".ipynb"):
        return "\n\n".join(_cell(cell) for cell in json.loads(text)["cells"])
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    language = LANGUAGES.get(place.suffix, "text")
    return f"# {path}\n\n{fence}{language}\n{text}\n{fence}\n"


def _cell(cell: dict) -> str:
    source = "".join(cell["source"])
    return source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"


def _has_links(path: str) -> bool:
    return path.endswith((".md", ".ipynb")) or (ROOT / path).is_dir()


def _resolve(path: str, to: str) -> str:
    base = path if (ROOT / path).is_dir() else posixpath.dirname(path)
    return posixpath.normpath(posixpath.join(base, to))


def on_files(files, config):
    from mkdocs.structure.files import File

    PATHS.clear()
    todo = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    todo += ["LOG.md", "CHANGELOG.md", "CONTRIBUTING.md", "tpu/README.md"]  # in the navigation
    seen = set()
    while todo:
        path = todo.pop()
        uri = page_of(path)
        if uri is None or path in seen:
            continue
        seen.add(path)
        if not path.startswith("docs/"):
            PATHS[uri] = path
            front = "---\nsearch: {exclude: true}\n---\n\n"  # the pages and the reference say it
            files.append(File.generated(config, uri, content=front + text_of(path)))
        if _has_links(path):
            todo += targets(text_of(path), path)
    return files


def on_page_markdown(markdown, page, config, files):
    uri = page.file.src_uri
    if uri in WIDE:
        page.meta["hide"] = ["navigation", "toc"]
    path = PATHS.get(uri, f"docs/{uri}")
    if _has_links(path):
        return rewrite(markdown, path, uri)
    return markdown


def on_page_content(html, page, config, files):
    """Long names of fields in tables may break after a dot."""
    return re.sub(
        r"(?<=<td><code>)[\w.]+(?=</code>)", lambda name: name[0].replace(".", ".<wbr>"), html
    )
