import pytest

from docs.generate.kernels import PAGE, page

pytestmark = pytest.mark.check


def test_the_committed_page_is_what_the_tables_generate():
    assert PAGE.read_text() == page(), "run python -m docs.generate"
