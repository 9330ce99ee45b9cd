"""What is kept of calls, and for how long: the file does not grow with all that was ever asked."""

import pytest

from jaxrl.tools.tinker.journal import DONE, Call, Journal

LATER = 1e12  # seconds: after all that is done here


@pytest.fixture
def journal(tmp_path):
    made = Journal(tmp_path / "journal.db")
    yield made
    made.close()


def ask(journal, target, number, kind="sample", body=b"x" * 2_000, *, done=True):
    call = Call(f"{target}:{number}", "owner", target, number, kind, body)
    journal.accept(call)
    if done:
        journal.finish(call.id, DONE, b"y" * 2_000)
    return call


def kept(journal):
    """What there is of each call: its name, and whether with its body and its answer."""
    sql = "SELECT id, body IS NOT NULL, answer IS NOT NULL FROM calls ORDER BY target, number"
    return [(name, bool(body), bool(answer)) for name, body, answer in journal.rows(sql)]


def test_of_old_calls_stays_what_may_be_done_again_and_the_last(journal):
    for number in range(4):
        ask(journal, "model", number, "optim_step")
    journal.forget_bodies("model", 1)  # a state has them in it
    for number in range(4):
        ask(journal, "sampler", number, done=number != 1)
    before = kept(journal)
    journal.forget_answers(0.0)  # none is as old
    assert kept(journal) == before and len(before) == 8
    journal.forget_answers(LATER)
    again = [("model:2", True, False), ("model:3", True, False)]
    assert kept(journal) == [*again, ("sampler:1", True, False), ("sampler:3", False, False)]


def test_a_loss_stays_while_its_owner_has_a_session(journal):
    for name in ("one", "other"):
        journal.rows("INSERT INTO sessions VALUES (?, 'owner', 0, 0, NULL, '{}')", name)
    for number in range(2):
        ask(journal, "one", number, "create_custom_loss")
    for ended in ("one", "other"):
        journal.rows("UPDATE sessions SET ended = 1 WHERE id = ?", ended)
        before = kept(journal)
        journal.forget_answers(LATER)
        if ended == "one":
            assert kept(journal) == [(name, True, False) for name, *_ in before]
    assert kept(journal) == [("one:1", False, False)]


def test_the_file_is_as_large_as_what_is_kept(journal):
    """2,000 calls in ten times, each forgotten when the next have come."""
    pages = []
    for part in range(10):
        with journal.together():  # written to the disk at once
            for number in range(200 * part, 200 * part + 200):
                ask(journal, "sampler", number)
        journal.forget_answers(LATER)
        assert kept(journal) == [(f"sampler:{200 * part + 199}", False, False)]
        pages += journal.rows("PRAGMA page_count")[0]
    assert max(pages[1:]) <= pages[0] + 2  # the first has the room of 200 answers
