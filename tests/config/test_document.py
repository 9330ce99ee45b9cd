from jaxrl.config.document import PAGE, configuration_page


def test_the_committed_page_is_what_the_schema_generates():
    assert PAGE.read_text() == configuration_page(), "run python -m jaxrl.config.document"
