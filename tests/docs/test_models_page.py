import pytest

from docs.generate.models import PAGE, PUBLISHED, page
from jaxrl.models.families import FAMILIES

pytestmark = pytest.mark.check


def test_the_committed_page_is_what_the_families_and_their_measurements_generate():
    assert PAGE.read_text() == page(), "run python -m docs.generate"
    assert PUBLISHED.keys() == FAMILIES.keys()
