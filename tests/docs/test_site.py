"""The site: a strict build, nothing from elsewhere, all links and anchors, a look by Chromium."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.tools.report.browser import Browser, find_browser

pytestmark = pytest.mark.slow
pytest.importorskip("mkdocs", reason="`make docs` installs the extra docs")
ROOT = Path(__file__).parents[2]
LOADED = "document.readyState === 'complete' && document.querySelector('.md-content h1') !== null"


class Page(HTMLParser):
    """Ids, links and what a page loads."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.loaded = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif (
            tag in ("script", "img", "iframe", "source", "link") and given.get("rel") != "canonical"
        ):
            self.loaded += [given[name] for name in ("src", "href") if given.get(name)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site: the one that `make docs` has just built, where CI names it."""
    if built := os.environ.get("JAXRL_SITE"):
        return ROOT / built
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", folder]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}


def test_nothing_is_loaded_from_elsewhere(pages):
    elsewhere = {
        (path.name, address)
        for path, page in pages.items()
        for address in page.loaded
        if urlsplit(address).scheme not in ("", "data") or address.startswith("//")
    }
    assert not elsewhere


def test_every_link_and_anchor_is_there(site, pages):
    broken, followed = [], 0
    for path, page in pages.items():
        if path.name == "404.html":  # its links are absolute, for a server
            continue
        for address in [*page.links, *page.loaded]:
            parts = urlsplit(address)
            if parts.scheme or address.startswith("//"):
                continue
            followed += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.is_file() or (anchor and anchor not in pages[target].ids):
                broken.append(f"{path.relative_to(site)}: {address}")
    assert not broken
    assert followed > 5000


def test_links_to_sources_are_pages(site):
    listing = (site / "source/jaxrl/losses/kl.py.html").read_text()
    assert "approximate_kl" in listing
    assert 'href="source/jaxrl/trainer.py.html"' in (site / "data_flow.html").read_text()


@pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed")
def test_chromium_shows_it_and_finds_words_without_a_server(site):
    with Browser(1400, 900) as browser:
        browser.open(site / "index.html", drawn=LOADED)
        assert browser.run("document.querySelector('h1').textContent").startswith("jaxrl")
        assert browser.run("[...document.images].every(i => i.naturalWidth > 0)")
        wide = "document.documentElement.scrollWidth <= innerWidth"
        assert browser.run(wide)
        browser.run(
            "{const q = document.querySelector('.md-search__input'); q.focus();"
            " q.value = 'zero variance'; q.dispatchEvent(new Event('input', {bubbles: true})); 0}"
        )
        browser.wait("document.querySelector('.md-search-result__link') !== null")
        assert [
            r for r in browser.requests if urlsplit(r).scheme not in ("file", "data", "about")
        ] == []
        assert browser.problems == []
