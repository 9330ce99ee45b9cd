"""The environment search: corpora, BM25, the protocol over HTTP, and servers that fail."""

import asyncio
import functools
import json
import socket
import subprocess
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrl import config as cfg, envs
from jaxrl.envs import json_request
from jaxrl.envs.json_request import RequestError
from jaxrl.envs.retrieval import retriever, retriever_server
from jaxrl.envs.retrieval.passages import Passage, read_passages
from jaxrl.envs.retrieval.retriever import Hit, LocalRetriever, RemoteRetriever
from jaxrl.envs.retrieval.retriever_server import main, make_server
from jaxrl.envs.tasks.search import normalize_answer
from tests.envs.json_server import JsonServer, closed_url, serving

PASSAGES = [
    Passage("fr", "Paris is the capital of France"),
    Passage("it", "Rome is the capital of Italy"),
    Passage("nl", "Amsterdam is the capital of the Netherlands, whose seat is The Hague"),
]
FRANCE = {"document": {"id": 7, "contents": "Paris is in France."}, "score": 0.5}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(json_request, "FIRST_WAIT", 0.001)


@pytest.fixture
def corpus(tmp_path):
    file = tmp_path / "capitals.jsonl"
    rows = ({"id": p.id, "contents": p.contents} for p in PASSAGES)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def make(targets, max_turns=3, **settings):
    row = {"reward_spec": {"ground_truth": {"target": targets}}, "max_turns": max_turns}
    return envs.make("search", row, {"search": settings})


def said(step):
    (message,) = step["observations"]
    assert message["role"] == "user"
    return message["content"]


# ---- corpora -------------------------------------------------------------------------------------


def test_a_folder_is_cut_into_passages(tmp_path):
    words = [f"w{i}" for i in range(230)]
    (tmp_path / "b").mkdir()
    (tmp_path / "b/long.md").write_text("\n\n".join(words))
    (tmp_path / "a.TXT").write_text("one two")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "c.jsonl").write_text('{"contents": "x"}\n\n{"contents": "y", "id": 3}\n')
    (tmp_path / "ignored.csv").write_text("contents\nz\n")
    found = read_passages(str(tmp_path))
    # 230 words are 100 + 100 + 30; a row without an id is named by its place
    assert [p.id for p in found] == [
        "a.TXT:0", "b/long.md:0", "b/long.md:1", "b/long.md:2", "c.jsonl:0", "3"
    ]  # fmt: skip
    assert found[0].contents == '"a"\none two'
    assert found[3].contents == '"long"\n' + " ".join(words[200:])
    assert [p.contents for p in found[4:]] == ["x", "y"]


def test_parquet_and_titles(tmp_path):
    file = tmp_path / "wiki.parquet"
    rows = [
        {"contents": '"Paris"\nA city', "title": '"Paris"', "id": 5, "other": 1},
        {"contents": "A river", "title": "Seine", "id": 6, "other": 2},
        {"contents": "Nothing", "title": None, "id": None, "other": 3},
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)
    assert read_passages(str(file)) == [
        Passage("5", '"Paris"\nA city'),  # the title is there already
        Passage("6", '"Seine"\nA river'),
        Passage("wiki.parquet:2", "Nothing"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("nowhere.jsonl", None, "nowhere.jsonl' does not exist .* give a folder of .txt, .md"),
        ("x.csv", b"contents", "x.csv' is of no known kind"),
        ("x.jsonl", b"", "has no passage in 1 files"),
        ("x.jsonl", b'{"contents": "y"}\n{"text": "y"}\n', r"row x.jsonl:1 .* it has \['text'\]"),
        (
            "x.jsonl",
            b'{"contents": "y"}\n{"contents"',
            "x.jsonl' cannot be read: line 2: malformed",
        ),
        ("x.jsonl", b"3", "row x.jsonl:0 has no text in the column contents; it has int"),
        ("x.txt", b"\xff\xfe", "x.txt' cannot be read: 'utf-8' codec"),
        ("x.parquet", b"PAR", "x.parquet' cannot be read: "),
    ],
)
def test_a_corpus_that_is_none(tmp_path, name, content, problem):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=problem):
        make("x", corpus=str(tmp_path / name))


def test_a_parquet_without_contents(tmp_path):
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"no column contents; the columns are \['text'\]"):
        make("x", corpus=str(tmp_path / "x.parquet"))


# ---- BM25 ----------------------------------------------------------------------------------------


def test_bm25_finds_what_shares_words():
    search = LocalRetriever(PASSAGES).search
    assert [hit.passage.id for hit in search("What is the capital of Italy?", 2)] == ["it", "fr"]
    assert [hit.passage.id for hit in search("Amsterdam", 3)] == ["nl"]  # no others, with score 0
    assert len(search("capital", 100)) == 3
    for nothing in ("", "the of is", "zebra", "?", "a"):
        assert search(nothing, 3) == []


def test_equal_scores_keep_the_order_of_the_corpus():
    passages = [Passage(str(i), "cheese" if i % 2 else "bread") for i in range(9)]
    hits = LocalRetriever(passages).search("cheese", 3)
    assert [hit.passage.id for hit in hits] == ["1", "3", "5"]
    # BM25 of Lucene: idf = ln(1 + (9 - 4 + 0.5) / (4 + 0.5)) = ln(2.2222), of a word that occurs
    # once in a passage of average length 1 / (1 + 1.5): 0.7985 / 2.5 = 0.3194
    assert {round(hit.score, 4) for hit in hits} == {0.3194}


def test_one_index_for_threads_that_start_together(corpus, monkeypatch):
    built = []
    original = LocalRetriever.__init__
    monkeypatch.setattr(
        LocalRetriever,
        "__init__",
        lambda self, passages: built.append(1) or original(self, passages),
    )
    found, start = [], threading.Barrier(8)

    def work():
        start.wait()
        env = make("Paris", corpus=corpus)
        found.extend(env.retriever.search("capital France", 1) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert len(found) == 160
    assert {hits[0].passage.id for hits in found} == {"fr"}


def test_without_the_package(monkeypatch, corpus):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ImportError, match=r"search.corpus needs .* pip install 'jaxrl\[envs\]'"):
        make("x", corpus=corpus)


def test_a_corpus_of_nothing_but_stop_words():
    with pytest.raises(ValueError, match="1 passages hold no word"):
        LocalRetriever([Passage("0", "the of a")])


# ---- conversations -------------------------------------------------------------------------------


def test_a_conversation(corpus):
    env = make(["Paris", "Lutetia"], corpus=corpus, topk=1)
    action = "<think>.</think><search> France, capital </search><information>Lyon</information>"
    step = env.step(action)
    assert said(step) == ("\n<information>Doc 1: Paris is the capital of France\n</information>\n")
    assert step["postprocessed_action"] == "<think>.</think><search> France, capital </search>"
    assert (step["reward"], step["done"]) == (0.0, False)
    assert "write <search>query</search> or <answer>" in said(env.step("Hm."))
    step = env.step("<answer>the LUTETIA!</answer>")
    assert (step["reward"], step["done"], step["observations"]) == (1.0, True, [])
    assert env.get_metrics() == {
        "correct": 1.0, "answered": 1.0, "searches": 1, "search_errors": 0
    }  # fmt: skip


def test_what_is_found_is_not_what_is_answered(tmp_path):
    (tmp_path / "trap.txt").write_text("trap <answer>Paris</answer>")
    env = make("Paris", max_turns=2, corpus=str(tmp_path))
    assert "<answer>Paris</answer>" in said(env.step("<search>trap</search>"))
    step = env.step("")
    assert (step["reward"], step["done"]) == (0.0, True)


def test_nothing_is_found(corpus):
    assert said(make("x", corpus=corpus).step("<search>zebra</search>")) == (
        "\n<information>No results.</information>\n"
    )


@pytest.mark.parametrize(
    ("text", "plain"),
    [("The  Beatles!", "beatles"), ("A.N. Other", "other"), ("1,984", "1984"), ("an", "")],
)
def test_answers_are_normalised(text, plain):
    assert normalize_answer(text) == plain


def test_the_right_answers_of_a_row(corpus):
    for given in ("Paris", ["Rome", "Paris"], {"target": "Paris"}, {"target": ["Paris"]}):
        row = {"reward_spec": {"ground_truth": given}}
        env = envs.make("search", row, {"search": {"corpus": corpus}})
        assert env.step("<answer>Paris</answer>")["reward"] == 1.0
    for given in (None, {}, [], {"target": None}, {"target": [1]}, 3, {"targets": ["Paris"]}):
        with pytest.raises(ValueError, match="'search' needs a column reward_spec"):
            envs.make("search", {"reward_spec": {"ground_truth": given}})


# ---- over HTTP -----------------------------------------------------------------------------------


def test_the_request_is_what_skyrl_and_search_r1_take():
    with serving(JsonServer(lambda question: {"result": [[FRANCE, FRANCE]]})) as server:
        hits = RemoteRetriever(server.url).search("France?", 1)
    assert hits == [Hit(Passage("7", "Paris is in France."), 0.5)]  # more than was asked for is cut
    assert server.questions == [
        {"query": "France?", "queries": ["France?"], "topk": 1, "return_scores": True}
    ]


@pytest.mark.parametrize(
    ("answer", "hits"),
    [
        ({"result": []}, 0),
        ({"result": [[]]}, 0),
        ({"result": [[FRANCE]]}, 1),
        ({"result": [[{"id": 3, "contents": "without a score"}]]}, 1),
    ],
)
def test_answers_of_servers(answer, hits):
    with serving(JsonServer(lambda question: answer)) as server:
        assert len(RemoteRetriever(server.url).search("q", 3)) == hits


GARBAGE = (
    b"", b"no JSON", b"[]", b"{}", b'{"result": 3}', b'{"result": [["x"]]}',
    b'{"result": [[{"document": {"text": "x"}}]]}', b'{"result": [[{"contents": 3}]]}',
    b"\xff\xfe\x00", b"[" * 100_000,
)  # fmt: skip
FAULTS = (500, 502, 503, 429, 408, "hang", "drip", "slow headers", "reset", "cut", *GARBAGE)


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_is_made_up_for(fault):
    with serving(JsonServer(lambda question: {"result": [[FRANCE]]}, [fault])) as server:
        env = make("Paris", search_url=server.url, timeout=0.3)
        assert said(env.step("<search>France</search>")) == (
            "\n<information>Doc 1: Paris is in France.\n</information>\n"
        )
    assert len(server.questions) == 2
    assert env.get_metrics()["search_errors"] == 0


@pytest.mark.parametrize(
    ("fault", "attempts", "reason"),
    [
        (500, 5, "status 500: a fault of the test"),
        ("hang", 5, "[Tt]imed out"),
        ("drip", 5, "not whole after 0.1 s"),
        ("slow headers", 5, "not whole after 0.1 s"),
        (b"no JSON", 5, "cannot use the answer 'no JSON'"),
        (404, 1, "status 404: a fault of the test"),  # is no better the next time
        (422, 1, "status 422"),
    ],
)
def test_a_server_that_stays_ill_costs_a_turn_and_is_counted(fault, attempts, reason, caplog):
    with serving(JsonServer(None, [fault], endless=True)) as server:
        env = make("Paris", search_url=server.url, timeout=0.1)
        step = env.step("<search>France</search>")
        with pytest.raises(RequestError, match=f"in {attempts} attempts; the last: .*{reason}"):
            env.ready()
    assert "The search failed" in said(step)
    assert (step["reward"], step["done"]) == (0.0, False)
    assert len(server.questions) == 2 * attempts
    assert env.get_metrics()["search_errors"] == 1
    assert f"gave no answer in {attempts} attempts" in caplog.text
    assert env.step("<answer>Paris</answer>")["reward"] == 1.0  # it can still be known


def test_an_answer_without_end_is_cut():
    with (
        serving(JsonServer(None, ["endless"], endless=True)) as server,
        pytest.raises(RequestError, match="more than 16777216 bytes"),
    ):
        json_request.ask(server.url, {}, dict, timeout=60, attempts=1)


def test_asked_where_a_loop_runs():
    async def search(url):
        return RemoteRetriever(url).search("q", 1)

    with serving(JsonServer(lambda question: {"result": [[FRANCE]]})) as server:
        assert asyncio.run(search(server.url))


def test_passwords_of_the_machine_are_not_sent(tmp_path, monkeypatch):
    """Neither do those of ~/.netrc come in the way of the key that a judge is asked with."""
    (tmp_path / "netrc").write_text("default login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    ask = functools.partial(json_request.ask, read=dict, timeout=5, attempts=1)
    with serving(JsonServer(lambda question: {"result": 1})) as server:
        ask(server.url, {})
        ask(server.url, {}, headers={"Authorization": "Bearer key"})
        with pytest.raises(RequestError, match="AUTHORIZATION header"):
            ask(server.url.replace("//", "//me:secret@"), {}, headers={"Authorization": "Bearer k"})
    assert server.keys == [None, "Bearer key"]


def test_a_proxy_of_the_environment_is_asked(monkeypatch):
    with serving(JsonServer(lambda question: {"result": 1})) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "direct.example")
        ask = functools.partial(json_request.ask, read=dict, timeout=5, attempts=1)
        assert ask("http://judge.example/score", {}) == ({"result": 1}, 1)
        with pytest.raises(RequestError):
            ask("http://direct.example/score", {})
    assert len(proxy.questions) == 1


def test_nobody_listens(caplog):
    env = make("Paris", search_url=closed_url())
    assert "The search failed" in said(env.step("<search>France</search>"))
    assert "Connection refused" in caplog.text


def test_the_server_says_when_to_ask_again(monkeypatch):
    slept = []
    monkeypatch.setattr(json_request.time, "sleep", slept.append)
    later = {"status": 429, "headers": {"Retry-After": "7"}}
    ever = {"status": 503, "headers": {"Retry-After": "3600"}}
    server = JsonServer(lambda question: {"result": [[FRANCE]]}, [500, later, ever, 500])
    monkeypatch.setattr(json_request.random, "uniform", lambda low, high: 1.0)
    monkeypatch.setattr(json_request, "FIRST_WAIT", 1.0)
    with serving(server):
        server.seconds = 0
        assert RemoteRetriever(server.url).search("q", 1)
    # 1, then 7 instead of 2, then 30 at most, then 8; the server sleeps 0 at each request
    assert [seconds for seconds in slept if seconds] == [1, 7, 30, 8]


def test_requests_are_logged_if_asked_for(caplog):
    with serving(JsonServer(lambda question: {"result": [[FRANCE]]})) as server:
        for log_requests in (False, True):
            env = make("Paris", search_url=server.url, log_requests=log_requests)
            env.step("<search>France</search>")
            assert ("1 hits for 'France', attempt 1" in caplog.text) == log_requests


# ---- our own server ------------------------------------------------------------------------------


def ask(url, question):
    body = question if isinstance(question, bytes) else json.dumps(question).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body)) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_our_server_gives_what_the_index_gives():
    local = LocalRetriever(PASSAGES)
    with serving(make_server(local, "127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}/retrieve"
        remote = RemoteRetriever(url)
        for query in ("capital of Italy", "zebra", "The Hague"):
            assert remote.search(query, 2) == local.search(query, 2)
        env = make("Paris", search_url=url)
        env.ready()
        assert "Paris is the capital" in said(env.step("<search>capital of France</search>"))
        # as Search-R1 asks: several, without scores
        status, answer = ask(url, {"queries": ["Rome", "zebra"], "topk": 1})
        rome = {"id": "it", "contents": PASSAGES[1].contents}
        assert (status, answer) == (200, {"result": [[rome], []]})
        no_questions = (b"x", b"[" * 100_000, 5, [], {}, {"query": 3}, {"queries": "x"})
        for wrong in (*no_questions, {"query": "x", "topk": -1}):
            status, answer = ask(url, wrong)
            assert (status, list(answer)) == (400, ["error"])


class Anything:
    """Finds as many passages as it is asked for; says how often it was."""

    def __init__(self, contents="x"):
        self.contents, self.searches = contents, 0

    def search(self, query, topk):
        self.searches += 1
        return [Hit(Passage(str(i), self.contents), 1.0) for i in range(topk)]


@pytest.mark.parametrize(
    ("question", "contents", "searches", "said"),
    [
        ({"queries": ["a"] * 4096, "topk": 1}, "x", 4096, None),
        ({"queries": ["a"] * 5, "topk": 1000}, "x", 0, "5 queries with topk=1000 are 5000 passage"),
        ({"queries": ["a"] * 2000}, "x", 0, "2000 queries with topk=3 are 6000 passages; ask for "),
        ({"query": "a", "topk": 1001}, "x", 0, "topk must be 1 to 1000"),
        # 3 passages of 1 M characters fit into 4 M, those of a second query do not
        ({"queries": ["a"] * 9}, "x" * 2**20, 2, "its passages have more than 4194304 characters"),
        ({"query": "a" * 256 * 1024}, "x", 0, "bytes, not 0 to 262144"),
    ],
    ids=["most", "hits", "queries", "topk", "characters", "bytes"],
)
def test_our_server_answers_no_question_without_bound(question, contents, searches, said):
    found = Anything(contents)
    with serving(make_server(found, "127.0.0.1", 0)) as server:
        status, answer = ask(f"http://127.0.0.1:{server.server_address[1]}/retrieve", question)
    assert found.searches == searches
    assert status == (200 if said is None else 400)
    assert said is None or said in answer["error"]


def test_our_server_makes_few_answers_at_a_time():
    begun, go = threading.Semaphore(0), threading.Event()

    class Slow(Anything):
        def search(self, query, topk):
            begun.release()
            assert go.wait(60)
            return super().search(query, topk)

    with serving(make_server(Slow(), "127.0.0.1", 0)) as server, ThreadPoolExecutor(20) as pool:
        url = f"http://127.0.0.1:{server.server_address[1]}/retrieve"
        calls = [pool.submit(ask, url, {"query": "a"}) for _ in range(20)]
        for _ in range(8):
            assert begun.acquire(timeout=60)
        assert not begun.acquire(timeout=0.2)
        go.set()
        assert {call.result()[0] for call in calls} == {200}


@pytest.mark.parametrize(
    ("length", "said"), [(-1, b"400 Bad Request"), (10, b"")], ids=["negative", "never sent"]
)
def test_our_server_waits_for_no_question_without_end(length, said, monkeypatch):
    monkeypatch.setattr(retriever_server, "_TIMEOUT", 0.2)
    made = make_server(LocalRetriever(PASSAGES), "127.0.0.1", 0)
    with serving(made), socket.create_connection(made.server_address[:2], timeout=10) as client:
        client.sendall(b"POST /retrieve HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % length)
        answer = client.recv(100)  # or it times out
    assert answer.partition(b" ")[2][: len(said)] == said and bool(answer) == bool(said)


def test_the_command_refuses_what_it_cannot_serve(capsys):
    assert main(["--corpus", "nowhere.jsonl"]) == 2
    assert "the corpus 'nowhere.jsonl' does not exist" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command(corpus):
    words = ["-m", "jaxrl.envs.retrieval.retriever_server", "--corpus", corpus, "--port", "0"]
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline().strip()
            assert line.startswith("3 passages at http://127.0.0.1:")
            (hit,) = RemoteRetriever(line.rpartition(" ")[2]).search("Italy", 3)
            assert hit.passage == PASSAGES[1]
        finally:
            process.terminate()


# ---- config --------------------------------------------------------------------------------------


def test_defaults_are_skyrls():
    settings = cfg.get_config_as_dict(cfg.TrainConfig())["environment"]["skyrl_gym"]["search"]
    found = retriever.retriever_of(settings)
    assert isinstance(found, RemoteRetriever)
    assert (found.url, found.timeout, found.log_requests) == (
        "http://127.0.0.1:8000/retrieve", 30, False
    )  # fmt: skip
    assert found.url == retriever.retriever_of({}).url
