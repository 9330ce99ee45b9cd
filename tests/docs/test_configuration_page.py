import pytest

from docs.generate.configuration import PAGE, page

pytestmark = pytest.mark.check


def test_the_committed_page_is_what_the_schema_generates():
    assert PAGE.read_text() == page(), "run python -m docs.generate"
