"""Links of docs/ to files outside of it: what docs/hooks.py makes of them."""

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.check
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs/hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("path", "page"),
    [
        ("jaxrl/losses/kl.py", "source/jaxrl/losses/kl.py.md"),
        ("LOG.md", "source/LOG.md"),
        ("tpu", "source/tpu/README.md"),  # a folder with a README is its README
        ("examples/algorithms", "source/examples/algorithms/index.md"),
        ("docs/ledger.md", "ledger.md"),
        ("docs/curves/quickstart.png", "curves/quickstart.png"),
        ("jaxrl/no_such_file.py", None),
    ],
)
def test_page_of_a_file(hooks, path, page):
    assert hooks.page_of(path) == page


@pytest.mark.parametrize(
    ("path", "uri", "markdown", "expected"),
    [
        (
            "docs/lora.md",
            "lora.md",
            "[log](../LOG.md#x) and [here](critics.md) and [there](https://a.b/c)",
            "[log](source/LOG.md#x) and [here](critics.md) and [there](https://a.b/c)",
        ),
        (
            "docs/api/models.md",
            "api/models.md",
            "[example](../../examples/flax_policy.py)",
            "[example](../source/examples/flax_policy.py.md)",
        ),
        (
            "tpu/README.md",
            "source/tpu/README.md",
            "[jobs](../docs/cluster.md), [create.sh](create.sh)",
            "[jobs](../../cluster.md), [create.sh](create.sh.md)",
        ),
        # in code nothing is a link, and what leads nowhere is left for the strict build
        ("docs/a.md", "a.md", "`f[i](../LOG.md)`", "`f[i](../LOG.md)`"),
        ("docs/a.md", "a.md", "```\n[i](../LOG.md)\n```", "```\n[i](../LOG.md)\n```"),
        ("docs/a.md", "a.md", "[i](../none.md)", "[i](../none.md)"),
    ],
)
def test_links_lead_to_pages(hooks, path, uri, markdown, expected):
    assert hooks.rewrite(markdown, path, uri) == expected


def test_a_listing_holds_the_file_whole_whatever_fences_it_has(hooks):
    text = hooks.text_of("docs/hooks.py")
    source = (ROOT / "docs/hooks.py").read_text()
    fence = text.splitlines()[2].removesuffix("python")
    assert set(fence) == {"`"} and fence not in source
    assert source in text


def test_a_notebook_is_its_cells(hooks):
    text = hooks.text_of("examples/notebooks/quickstart.ipynb")
    assert text.startswith("#") and "```python\n" in text and '"cell_type"' not in text
