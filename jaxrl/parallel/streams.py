"""Streams of objects from one process of a job to others, beside its collectives."""

import contextlib
import queue
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import jax

from jaxrl.parallel.jax_internals import global_state
from jaxrl.parallel.processes import allgather

SECONDS = 60.0  # until the other end is there: both ask for it at the same place of the program
GREETING_SECONDS = 10.0  # for whoever connects to show that it knows the secret
STRANGERS = 32  # connections that are asked for it at a time, beside those of the job


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
    end = socket.create_connection(address, timeout=SECONDS)
    try:
        stream = _greeted(end, secret, asks_first=False, seconds=SECONDS)
    except (AuthenticationError, EOFError) as error:
        raise OSError(f"process {first} at {address} does not answer as one of this job") from error
    stream.send(here)
    return {first: stream}


def _accept(server: socket.socket, secret: bytes, others: Sequence[int]) -> dict[int, Connection]:
    """Return a stream to each of the others; a stranger who says nothing holds up nobody."""
    found: dict[int, Connection] = {}
    greeted: queue.SimpleQueue[tuple[int, Connection]] = queue.SimpleQueue()
    places = threading.BoundedSemaphore(len(others) + STRANGERS)
    end = time.monotonic() + SECONDS

    def greet(accepted: socket.socket) -> None:
        with contextlib.suppress(AuthenticationError, EOFError, OSError):  # a stranger
            stream = _greeted(accepted, secret, asks_first=True, seconds=GREETING_SECONDS)
            greeted.put((stream.recv(), stream))
        places.release()

    def accept() -> None:
        with contextlib.suppress(OSError):  # it is closed
            while places.acquire():
                threading.Thread(target=greet, args=(server.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        while missing := set(others) - set(found):
            process, found_stream = greeted.get(timeout=max(end - time.monotonic(), 0.0))
            found[process] = found_stream
    except queue.Empty:
        raise OSError(
            f"processes {sorted(missing)} did not connect to process {jax.process_index()} at "
            f"{server.getsockname()[:2]} in {SECONDS:.0f} s: the hosts of a job need all ports "
            "of each other"
        ) from None
    finally:
        _shut(server)
    return found


def _greeted(end: socket.socket, secret: bytes, *, asks_first: bool, seconds: float) -> Connection:
    """Return a stream, once both ends have shown that they know the secret.

    Its messages leave at once, and it notices a host that is gone.

    Raises:
        AuthenticationError: the other end does not know it.
        EOFError, OSError: the other end has gone, or has not shown it in `seconds`.
    """
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream = Connection(end.dup().detach())
    limit = threading.Timer(seconds, _shut, (end,))  # however slowly its bytes come
    limit.start()
    try:
        for asks in (asks_first, not asks_first):
            (deliver_challenge if asks else answer_challenge)(stream, secret)
    except BaseException:
        stream.close()
        raise
    finally:
        limit.cancel()
        end.close()
    return stream


def _shut(end: socket.socket) -> None:
    """Wake the thread that waits for a socket: there will be nothing."""
    with contextlib.suppress(OSError):  # the other end has gone before
        end.shutdown(socket.SHUT_RDWR)


def own_address(peer: str) -> str:
    """Return the address of this machine that a host sees; nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(peer.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
