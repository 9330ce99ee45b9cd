"""Keep connections by which hosts notice that the launcher has gone."""

import contextlib
import os
import socket
import threading

CONNECT_SECONDS = 10.0
MOST = 512  # connections that are held; a job has one for each of its hosts


class Lifeline:
    """Hold the launcher's end: hosts connect to it, and it says nothing until it is closed.

    Args:
        host: address of this machine, by which the others reach it.

    Attributes:
        address: for `hold_on`.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, 0), family=family)
        except OSError:  # an address that is translated on its way here
            self._listener = socket.create_server(("", 0))
        self.address = host, self._listener.getsockname()[1]
        self._held: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Let go of all hosts."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._listener.close()
        for held in self._held:
            held.close()

    def _accept(self) -> None:
        """Take whoever comes, so that connections of others do not keep hosts waiting."""
        with contextlib.suppress(OSError):  # it is closed
            while True:
                end = self._listener.accept()[0]
                gone = [held for held in self._held if _has_gone(held)]
                self._held = [held for held in self._held if held not in gone]
                for held in gone if len(self._held) < MOST else (*gone, end):
                    held.close()
                if end.fileno() != -1:
                    self._held.append(end)


def _has_gone(end: socket.socket) -> bool:
    """Tell whether the other end is closed; hosts say nothing until then."""
    end.setblocking(False)
    try:
        return not end.recv(1)
    except BlockingIOError:
        return False
    except OSError:  # reset
        return True


def hold_on(address: tuple[str, int]) -> None:
    """End this process as soon as the launcher has closed its end, or has gone.

    Raises:
        ValueError: the launcher cannot be reached.
    """
    try:
        lifeline = socket.create_connection(address, timeout=CONNECT_SECONDS)
    except OSError as error:
        raise ValueError(
            f"{socket.gethostname()} cannot reach the launcher at {address} ({error}): the hosts "
            "of a job need all ports of each other"
        ) from error
    lifeline.settimeout(None)
    lifeline.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    threading.Thread(target=_exit_after, args=(lifeline,), daemon=True).start()


def _exit_after(lifeline: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed, or reset
        lifeline.recv(1)
    os._exit(1)  # the guards of its processes notice
