"""Weights that a server of jaxrl's pulls from the trainer's process."""

import asyncio
import re
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.rollout.protocol import Request, Sampling
from jaxrl.rollout.remote.engine import RemoteEngine, RemoteEngineError
from jaxrl.rollout.remote.http_client import RemoteOptions, RemoteServer, ServerError
from jaxrl.rollout.remote.probe import Probe, make_score
from jaxrl.rollout.server import service
from jaxrl.rollout.server.build import make_server
from jaxrl.rollout.weights import share as weight_share
from jaxrl.rollout.weights.changes import Changes
from jaxrl.rollout.weights.groups import Piece
from jaxrl.rollout.weights.incoming import NotAllowed, Notice, patience
from jaxrl.rollout.weights.transfer import Receiver, WeightTransfer, arrange, branches
from tests.rollout.server.conftest import model_folder, serve_config
from tests.rollout.server.test_remote_engine import MODEL, PARAMS, engine_of
from tests.rollout.server.test_server import ask

ASKED = [Request((3, 1, 4), ((1, 2), (1, 3)), Sampling(max_tokens=6, temperature=0.8))]
GROUP_BYTES = 100_000  # of 505,344: six groups


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("models") / "first", 0)


@pytest.fixture
def server(folder):
    running = make_server(serve_config(folder, **{"serve.receive_weights": True}), one_device())
    running.start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def servers(folder):
    config = serve_config(folder, **{"serve.receive_weights": True})
    running = [make_server(config, one_device()) for _ in range(3)]
    for server in running:
        server.start()
    yield running
    for server in running:
        server.stop()


def one_device():
    return jax.devices()[:1]


def transferring(*servers, probes=True, recovery=300.0, poll=0.1, hosts=(), delta=False):
    return RemoteEngine(
        [server.url.removesuffix("/v1") for server in servers],
        "native",
        hosts=hosts,
        weights=WeightTransfer(jnp.float32, GROUP_BYTES, delta=delta),
        probe=Probe(make_score(MODEL, jnp.float32, None, 16), MODEL.vocab_size, 1e-3)
        if probes
        else None,
        options=RemoteOptions(timeout_seconds=300, recovery_seconds=recovery, poll_seconds=poll),
    )


def notice(end, offer, number, transfer_id, base=None):
    """What a server is told of a group that is offered to it."""
    receiver = Receiver(SimpleNamespace(url="http://127.0.0.1:9"))  # pyright: ignore
    group = end._offer(offer, number, [receiver], base)
    return end._notice(receiver, offer, number, group, transfer_id, base).to_json()


def tokens(engine):
    return [(c.tokens, c.log_probs, c.versions) for group in engine.generate(ASKED) for c in group]


def test_samples_are_those_with_weights_from_a_folder(server, tmp_path_factory):
    through_files = engine_of(server, server.limits.weights_root + "/weights", token=None)
    through_files.update_weights(PARAMS, 5)
    expected = tokens(through_files)
    through_files.update_weights(jax.tree.map(jnp.zeros_like, PARAMS), 6)
    through_files.close()
    engine = transferring(server)
    assert len(engine.source.publish(PARAMS, 5).groups) > 4
    engine.update_weights(PARAMS, 5)
    assert tokens(engine) == expected
    engine.close()


def few_changes(params):
    """Other parameters, of which three elements have other bits."""
    embed, wq = params["embed"], params["layers"]["wq"]
    layers = params["layers"] | {"wq": wq.at[0, 1, 2, 3].add(1.0).at[1, 3, 2, 1].set(0.5)}
    return params | {"embed": embed.at[3, 1].add(0.25), "layers": layers}


def test_what_changed_is_sent_where_that_is_less(server):
    """Three elements, each as a place of 4 bytes and a float32; then all, in their groups."""
    engine = transferring(server, delta=True)
    engine.update_weights(PARAMS, 5)
    everything = sum(x.nbytes for x in jax.tree.leaves(PARAMS))
    assert engine.source.sent_bytes == everything
    other = few_changes(PARAMS)
    engine.update_weights(other, 6)
    assert engine.source.sent_bytes == 3 * (4 + 4)
    found = tokens(engine)
    engine.update_weights(other, 7)  # nothing changed
    assert engine.source.sent_bytes == 0
    engine.update_weights(jax.tree.map(lambda x: x * 1.01, other), 8)
    assert 0.99 * everything < engine.source.sent_bytes <= everything
    engine.close()
    whole = transferring(server)
    whole.update_weights(other, 6)
    assert tokens(whole) == found
    whole.close()


def test_a_server_without_the_version_before_gets_the_whole(server):
    """It was started again; and it got weights of another trainer under the number of ours."""
    engine, other = (transferring(server, delta=True, poll=60.0) for _ in range(2))
    everything = sum(x.nbytes for x in jax.tree.leaves(PARAMS))
    engine.update_weights(PARAMS, 5)
    server._weights[2]._kept = None
    engine.update_weights(few_changes(PARAMS), 6)
    assert engine.source.sent_bytes == 4 + 4 + everything  # a change in vain
    other.update_weights(jax.tree.map(lambda x: x + 1, PARAMS), 6)
    engine.update_weights(PARAMS, 7)
    assert engine.source.sent_bytes == 4 + 4 + everything  # the sum of the whole found it out
    engine.close()
    other.close()


@pytest.fixture
def two_versions(server):
    """A trainer's end whose version 5 a server has, and its offer of version 6."""
    end = WeightTransfer(jnp.float32, GROUP_BYTES, delta=True)
    first = end.publish(PARAMS, 5)
    for number in range(len(first.groups)):
        told = notice(end, first, number, "first")
        assert ask(server, "/receive_weights", told)[0] == 200
    yield end, end.publish(few_changes(PARAMS), 6)
    held = server.host.guests.version
    assert held == 5  # whatever came


def test_changes_of_a_version_that_is_not_there_are_refused(server, two_versions):
    end, offer = two_versions
    told = notice(end, offer, 0, "second", 5)
    status, answer = ask(server, "/receive_weights", told | {"base": 4})
    assert status == 502
    assert "version 4, whose changes it is, is not here" in answer["error"]["message"]


def test_wrong_changes_are_found_out_by_the_whole(server, two_versions, monkeypatch):
    end, offer = two_versions
    right = weight_share.changes

    def elsewhere(before, after):
        made = right(before, after)
        return made._replace(places=made.places + 1)

    monkeypatch.setattr(weight_share, "changes", elsewhere)
    status, answer = send_all(server, end, offer)
    assert status == 502 and "came with other bits than were sent: " in answer["error"]["message"]


def test_places_outside_of_a_piece_are_refused(server, two_versions, monkeypatch):
    end, offer = two_versions
    right = weight_share.changes

    def beyond(before, after):
        made = right(before, after)
        return made._replace(places=made.places + np.uint32(before.size))

    monkeypatch.setattr(weight_share, "changes", beyond)
    status, answer = send_all(server, end, offer)
    assert status == 502 and re.search("place .* of a piece of ", answer["error"]["message"])


def test_changes_that_are_cut_short_are_refused(server, two_versions, monkeypatch):
    end, offer = two_versions
    right = weight_share.changes

    def short(before, after):
        made = right(before, after)
        return Changes(made.places[:-1], made.values[:-1])

    monkeypatch.setattr(weight_share, "changes", short)
    status, answer = send_all(server, end, offer)
    assert status == 502 and "came with other bits than were sent: " in answer["error"]["message"]


@pytest.mark.parametrize("change", [-1, 1])
def test_changes_of_another_number_than_were_sent_are_refused(server, two_versions, change):
    end, offer = two_versions
    offer = end.publish(jax.tree.map(lambda x: x.at[..., :2].add(1), PARAMS), 6)
    told = notice(end, offer, 0, "second", 5)
    assert told["changed"][0] == 2 * PARAMS["embed"].shape[0]
    other = [told["changed"][0] + change, *told["changed"][1:]]
    status, answer = ask(server, "/receive_weights", told | {"changed": other})
    assert status == 502 and "did not come from" in answer["error"]["message"]


def test_changes_in_another_order_are_refused(server, two_versions):
    end, offer = two_versions
    first, second = (notice(end, offer, n, "second", 5) for n in (0, 1))
    assert ask(server, "/receive_weights", first)[0] == 200
    assert ask(server, "/receive_weights", second | {"number": 2})[0] == 502


@pytest.mark.parametrize("changed", [[10**9], [-1], [1, 2, 3], "some"])
def test_a_notice_of_impossible_changes_is_refused(server, two_versions, changed):
    end, offer = two_versions
    told = notice(end, offer, 0, "second", 5)
    assert ask(server, "/receive_weights", told | {"changed": changed, "base": 5})[0] == 400


def send_all(server, end, offer):
    """Give notice of all groups until one is refused; the last answer."""
    for number in range(len(offer.groups)):
        told = notice(end, offer, number, "second", 5)
        answered = ask(server, "/receive_weights", told)
        if answered[0] != 200:
            break
    return answered


def test_other_bits_than_were_sent_are_refused_and_the_old_weights_stay(server, monkeypatch):
    engine = transferring(server, recovery=2.0, poll=60.0)
    engine.update_weights(PARAMS, 5)
    expected = tokens(engine)
    calls = []

    def third_is_wrong(arrays):
        calls.append(arrays)
        return [n + (len(calls) == 3) for n in right(arrays)]

    right = weight_share.sums
    monkeypatch.setattr(weight_share, "sums", third_is_wrong)
    new = jax.tree.map(lambda x: x + 1, PARAMS)
    with pytest.raises(
        RemoteEngineError, match=r"group 2 of \d+ \(.*\) of version 6 came with oth"
    ):
        engine.update_weights(new, 6)
    assert server.host.guests.version == 5
    ours = server.host.generate(ASKED)
    assert [(c.tokens, c.log_probs, c.versions) for g in ours for c in g] == expected
    engine.close()


def test_a_server_that_goes_in_the_middle_leaves_nothing_behind(server, monkeypatch):
    engine = transferring(server, probes=False, recovery=1.0)
    received = RemoteServer.receive

    async def second_finds_nobody(self, group, seconds):
        if group["number"] == 1:
            server.stop()
        return await received(self, group, seconds)

    monkeypatch.setattr(RemoteServer, "receive", second_finds_nobody)
    with pytest.raises(RemoteEngineError, match="no server was ready for 1 s"):
        engine.update_weights(PARAMS, 5)
    assert engine.source.shares.own._ends == {}  # and with them what was offered
    engine.close()


def test_a_server_that_comes_back_gets_the_weights_while_they_are_there(folder, server):
    """Until the engine sleeps, or the trainer donates them; then it waits for the next."""
    engine = transferring(server, probes=False, recovery=1.0)
    params = jax.tree.map(jnp.copy, PARAMS)
    engine.update_weights(params, 5)
    expected = tokens(engine)
    server.host.update_weights(jax.tree.map(jnp.zeros_like, PARAMS), 0)  # as if started again
    engine._call(engine._bring(engine.servers[0]))
    assert tokens(engine) == expected
    server.host.update_weights(PARAMS, 0)
    jax.tree.leaves(params)[-1].delete()  # as donation does
    error = engine._call(engine._bring(engine.servers[0]))
    assert "the trainer is at work on the next version" in str(error)
    engine.update_weights(PARAMS, 6)
    engine.sleep()
    server.host.update_weights(PARAMS, 0)
    error = engine._call(engine._bring(engine.servers[0]))
    assert "the trainer is at work on the next version" in str(error)
    engine.close()


PIECE = {"name": "embed", "starts": [0, 0], "shape": [1, 1], "dtype": "float32"}
PLACE = {"address": "127.0.0.1:1", "uuid": 1, "pieces": 1}  # where nobody listens
GROUP = {
    "places": [PLACE],
    "transfer": "one",
    "version": 3,
    "number": 0,
    "count": 1,
    "dtype": "float32",
    "pieces": [PIECE],
    "checksums": [7],
    "changed": [None],
    "base": None,
    "keep": False,
    "onward": [],
    "fresh": False,
}


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        (
            {"number": 1, "count": 3},
            502,
            r"group 1 of 3 \(embed\) of version 3 is not the next .*begin with 0",
        ),
        ({"number": 3}, 400, r"group 3 of 1, uuids=\[1\]"),
        ({"pieces": None}, 400, "without what belongs in it"),
        ({"dtype": "int8"}, 400, "dtype='int8'"),
        ({"places": [PLACE | {"address": "nowhere"}]}, 400, "address='nowhere': must be host:port"),
        ({"places": [PLACE | {"uuid": 2**64}]}, 400, r"uuids=\[18446744073709551616\]"),
        ({"onward": [-1]}, 400, r"uuids=\[-1, 1\]"),
        ({"places": []}, 400, r"places with \[\] of 1 pieces"),
        ({"places": [PLACE | {"pieces": 2}]}, 400, r"places with \[2\] of 1 pieces"),
        ({"changed": [1]}, 400, r"changed=\(1,\) of no version"),
        ({}, 502, r"did not come from 127\.0\.0\.1:1: .*refused"),
        (
            {"places": [PLACE | {"address": "10.0.0.9:22"}]},
            403,
            r"10\.0\.0\.9:22': this came from 127\.0\.0\.1, and .* serve\.weight_networks=\[\]",
        ),
        ({"places": [PLACE | {"address": "localhost:22"}]}, 403, "this came from"),
        # before anything is allocated or asked for
        ({"pieces": [PIECE | {"shape": [2**36, 1]}]}, 400, "not a part of embed"),
        ({"pieces": [PIECE | {"dtype": "garbage"}]}, 400, "comes as garbage; here it is float32"),
        ({"pieces": [PIECE | {"name": "x"}]}, 400, "x is none of this model's arrays"),
    ],
)
def test_what_is_no_notice_of_weights_is_refused(server, change, status, said):
    answered, answer = ask(server, "/receive_weights", GROUP | change)
    assert answered == status
    assert re.search(said, answer["error"]["message"])
    assert server.host.guests.version == 0


def test_nothing_is_pulled_where_it_is_not_allowed(folder, server, monkeypatch):
    monkeypatch.setattr(server.limits, "receive_weights", False)
    answered, answer = ask(server, "/receive_weights", GROUP)
    assert answered == 403
    assert "start with serve.receive_weights=true" in answer["error"]["message"]


def test_groups_of_two_trainers_are_never_mixed(server):
    """Both send version 5; the one that began last goes on."""
    one, other = [WeightTransfer(jnp.float32, GROUP_BYTES) for _ in "ab"]
    offers = {end: end.publish(PARAMS, 5) for end in (one, other)}

    def send(end, number, transfer):
        told = notice(end, offers[end], number, transfer)
        return ask(server, "/receive_weights", told)

    assert send(one, 0, "a")[0] == 200
    assert send(other, 0, "b")[0] == 200
    status, answer = send(one, 1, "a")
    assert status == 502 and "is not the next" in answer["error"]["message"]
    assert send(other, 1, "b")[0] == 200
    assert ask(server, "/sleep", {})[0] == 200  # what has come is not what the engine shall have
    assert send(other, 2, "b")[0] == 502
    assert server.host.guests.version is None


@pytest.mark.parametrize("error", [RuntimeError("Array has been deleted"), OSError("no such host")])
def test_what_jax_and_sockets_raise_is_an_error_of_that_server(server, monkeypatch, error):
    """The trainer may donate between the look and the cut; then the next update brings them."""
    engine = transferring(server, probes=False, recovery=0.5, poll=60.0)

    def failing(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engine.source.shares, "offer", failing)
        with pytest.raises(RemoteEngineError, match=f"could not be offered to .*{error}"):
            engine.update_weights(PARAMS, 5)
    engine.update_weights(PARAMS, 6)
    assert server.host.guests.version == 6
    engine.close()


def test_a_keeper_outlives_what_nobody_expected(server, monkeypatch):
    engine = transferring(server, probes=False, poll=0.05)
    engine.update_weights(PARAMS, 5)
    looked = []

    async def failing(self):
        looked.append(self)
        if len(looked) < 3:
            raise KeyError("a bug")
        return await look(self)

    look = RemoteServer.look
    monkeypatch.setattr(RemoteServer, "look", failing)
    deadline = time.monotonic() + 60
    while len(looked) < 3 or not engine.servers[0].ready:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    engine.close()


def test_what_has_come_is_thrown_away_when_nothing_follows(server, monkeypatch):
    monkeypatch.setattr(service, "IDLE_SECONDS", 0.0)
    end = WeightTransfer(jnp.float32, GROUP_BYTES)
    offer = end.publish(PARAMS, 5)
    for number, status in ((0, 200), (1, 502)):
        told = notice(end, offer, number, "a")
        assert ask(server, "/receive_weights", told)[0] == status


def test_a_server_that_hangs_holds_up_the_others_for_a_group_and_no_longer():
    """Servers are served one after the other; 1800 s is the limit of any other call."""
    waits = []

    class Hanging:
        url = "http://127.0.0.1:9"

        async def receive(self, group, seconds):
            waits.append(seconds)
            raise ServerError(f"no answer within {seconds:g} s")

    end = WeightTransfer(jnp.float32, GROUP_BYTES)
    with pytest.raises(ServerError, match="no answer"):
        asyncio.run(end.give(Hanging(), end.publish(PARAMS, 5), 5, ""))  # pyright: ignore
    assert 130 < waits[0] <= 130 + GROUP_BYTES / 20e6


def test_the_wait_for_a_group_grows_with_its_bytes():
    assert patience((Piece("a", (0,), (10**9,), "float32"),)) == 120 + 4e9 / 20e6  # 320 s


class SlowHost:
    """Runs; while `starting` is set it is being started."""

    def __init__(self, server):
        self.url, self.starting = server.url.removesuffix("/v1"), None

    async def ensure(self, folder):
        while self.starting:
            await asyncio.sleep(0.01)
        return False

    def stop(self):
        pass


def test_an_update_does_not_wait_for_a_server_that_is_being_started(servers):
    hosts = [SlowHost(server) for server in servers[:2]]
    engine = transferring(*servers[:2], probes=False, hosts=hosts)
    engine.update_weights(PARAMS, 5)
    _, second = engine.servers
    hosts[1].starting = True
    engine._leave_out(second, ServerError("it died"))
    engine.update_weights(PARAMS, 6)
    engine.update_weights(PARAMS, 7)
    assert not second.ready and {v for *_, each in tokens(engine) for v in each} == {7}
    hosts[1].starting = False
    deadline = time.monotonic() + 60
    while not (second.ready and second.version == 7):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    engine.close()


# ---- servers that have a group offer it to others


@pytest.mark.parametrize(
    ("receivers", "groups", "expected"),
    [
        (1, 1, (1, 1)),
        (3, 6, (1, 3)),  # a chain: 6 + 2 groups; two branches: 2 x (6 + 1)
        (8, 50, (1, 8)),  # 57
        (8, 1, (2, 3)),  # 2 + 4 + 8 servers in three levels: 2 x 3; a chain: 8
        (64, 1, (2, 6)),  # 2 + 4 + ... + 64; 2 x 6
        (0, 5, (1, 0)),
    ],
)
def test_the_tree_that_takes_least_time(receivers, groups, expected):
    assert branches(receivers, groups) == expected


def test_each_has_its_place_in_the_tree():
    """One pulls from the trainer alone; of seven others two do, of one group."""
    servers = [SimpleNamespace(url=f"http://10.0.0.{n}") for n in range(8)]
    tree = arrange(servers, 1, {"http://10.0.0.3"})  # pyright: ignore
    parents = [r.parent and tree.index(r.parent) for r in tree]
    assert parents == [None, None, 0, None, 0, 1, 1, 2]
    assert [r.depth for r in tree] == [0, 0, 1, 0, 1, 1, 1, 2]


@pytest.mark.parametrize("delta", [False, True])
def test_the_trainer_sends_what_all_servers_get_once(servers, delta):
    engine, everything = transferring(*servers, delta=delta), sum_of_bytes(PARAMS)
    engine.update_weights(PARAMS, 5)
    assert engine.source.sent_bytes == everything
    other = few_changes(PARAMS)
    engine.update_weights(other, 6)
    assert engine.source.sent_bytes == (3 * (4 + 4) if delta else everything)
    ours = [server.host.generate(ASKED) for server in servers]
    assert {server.host.guests.version for server in servers} == {6}
    first, *others = [[(c.tokens, c.log_probs) for g in each for c in g] for each in ours]
    assert others == [first, first]
    engine.close()


def sum_of_bytes(params):
    return sum(x.nbytes for x in jax.tree.leaves(params))


def test_one_that_fails_cuts_nobody_off(servers, monkeypatch):
    """The second of the chain refuses a group: the third gets all of them of the first."""
    engine = transferring(*servers, probes=False, poll=60.0)
    engine.update_weights(PARAMS, 5)
    received, first, failing = RemoteServer.receive, [], []

    async def refuse(self, group, seconds):
        if group["number"] == 2:
            if first and not failing:
                failing.append(self)
                raise ServerError("it broke")
            first.append(self)
        return await received(self, group, seconds)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteServer, "receive", refuse)
        engine.update_weights(few_changes(PARAMS), 6)
    assert sorted(server.host.guests.version for server in servers) == [5, 6, 6]
    assert [server for server in engine.servers if not server.ready] == failing
    assert engine.source._stale == {first[0].url}  # it offered what nobody pulled
    engine.update_weights(PARAMS, 7)
    engine._call(engine._bring(failing[0]))
    assert [server.host.guests.version for server in servers] == [7, 7, 7]
    assert not engine.source._stale
    engine.close()


def test_one_that_may_not_pull_from_others_gets_all_of_the_trainer(servers, monkeypatch):
    engine, received = transferring(*servers, probes=False), RemoteServer.receive

    async def refuse(self, group, seconds):
        ends = engine.source.shares.own._ends.values()
        if group["places"][0]["address"] not in [end.address() for end in ends]:
            raise ServerError("set serve.weight_networks", status=403, retryable=False)
        return await received(self, group, seconds)

    monkeypatch.setattr(RemoteServer, "receive", refuse)
    for version in (5, 6):
        engine.update_weights(PARAMS, version)
        assert [server.host.guests.version for server in servers] == [version] * 3
    assert engine.source._alone
    assert engine.source.sent_bytes == 3 * sum_of_bytes(PARAMS)
    engine.close()


def test_where_weights_may_be():
    told = Notice.read(GROUP | {"places": [PLACE | {"address": "10.1.2.3:7"}]})
    told.check_places("10.1.2.3", [])
    told.check_places("10.9.9.9", ["192.168.0.0/16", "10.1.0.0/16"])
    with pytest.raises(NotAllowed, match="came from 10.9.9.9"):
        told.check_places("10.9.9.9", ["10.2.0.0/16"])
