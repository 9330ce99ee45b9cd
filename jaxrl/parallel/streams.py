"""Streams of objects from one process of a job to others, beside its collectives."""

import secrets
import socket
import time
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import jax
from jax._src.distributed import global_state  # no public way to the coordinator's address

from jaxrl.parallel.processes import allgather

SECONDS = 60.0  # until the other end is there: both ask for it at the same place of the program


def open_streams(first: int, others: Sequence[int]) -> dict[int, Connection]:
    """Return the streams of this process, by the process at the other end; a collective.

    The first process has one to each of the others, which have one to it; a process that is neither
    has none. Whoever does not know a secret of this job is turned away.

    Raises:
        OSError: the processes do not reach each other.
    """
    here = jax.process_index()
    server, secret = None, secrets.token_bytes(32)
    if here == first:
        address = own_address((global_state.coordinator_address or "localhost").rpartition(":")[0])
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = socket.create_server((address, 0), family=family, backlog=len(others))
    place = server and server.getsockname()[:2]
    places = allgather((place, secret))
    if server is not None:
        with server:
            return _accept(server, secret, others)
    if here not in others:
        return {}
    address, secret = places[first]
    assert address is not None  # it listens
    stream = _stream(socket.create_connection(address, timeout=SECONDS))
    answer_challenge(stream, secret)
    deliver_challenge(stream, secret)
    stream.send(here)
    return {first: stream}


def _accept(server: socket.socket, secret: bytes, others: Sequence[int]) -> dict[int, Connection]:
    found: dict[int, Connection] = {}
    end = time.monotonic() + SECONDS
    while missing := set(others) - set(found):
        server.settimeout(max(end - time.monotonic(), 0.001))
        try:
            stream = _stream(server.accept()[0])
        except TimeoutError as error:
            raise OSError(
                f"processes {sorted(missing)} did not connect to process {jax.process_index()} at "
                f"{server.getsockname()[:2]} in {SECONDS:.0f} s: the hosts of a job need all ports "
                "of each other"
            ) from error
        try:
            deliver_challenge(stream, secret)
            answer_challenge(stream, secret)
        except (AuthenticationError, EOFError, OSError):  # somebody else
            stream.close()
            continue
        found[stream.recv()] = stream
    return found


def _stream(end: socket.socket) -> Connection:
    """Return a stream whose messages leave at once, and which notices a host that is gone."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Connection(end.detach())


def own_address(peer: str) -> str:
    """Return the address of this machine that a host sees; nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(peer.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
