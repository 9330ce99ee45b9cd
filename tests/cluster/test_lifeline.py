"""Hosts end with the launcher, and nobody else keeps them from it."""

import signal
import socket
import subprocess
import sys

import pytest

from jaxrl.cluster.lifeline import Lifeline, hold_on

HOST = """
import sys, threading
from jaxrl.cluster.lifeline import hold_on
hold_on(("127.0.0.1", int(sys.argv[1])))
print("held", flush=True)
threading.Event().wait()
"""
LAUNCHER = """
import sys, threading
from jaxrl.cluster.lifeline import Lifeline
print(Lifeline("127.0.0.1").address[1], flush=True)
threading.Event().wait()
"""


def start(program, *words):
    command = [sys.executable, "-c", program, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_hosts_end_when_the_launcher_lets_go():
    lifeline = Lifeline("127.0.0.1")
    hosts = [start(HOST, lifeline.address[1]) for _ in range(2)]
    assert [host.stdout.readline() for host in hosts] == ["held\n"] * 2
    assert [host.poll() for host in hosts] == [None, None]
    lifeline.close()
    assert [host.wait(60) for host in hosts] == [1, 1]
    with pytest.raises(ValueError, match="cannot reach the launcher"):
        hold_on(lifeline.address)


def test_hosts_end_when_the_launcher_is_killed():
    launcher = start(LAUNCHER)
    host = start(HOST, int(launcher.stdout.readline()))
    assert host.stdout.readline() == "held\n"
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    assert host.wait(60) == 1


def test_others_who_connect_keep_no_host_waiting():
    lifeline = Lifeline("127.0.0.1")
    others = [socket.create_connection(lifeline.address, timeout=10) for _ in range(300)]
    host = start(HOST, lifeline.address[1])
    assert host.stdout.readline() == "held\n"
    for other in others:
        other.close()
    lifeline.close()
    assert host.wait(60) == 1


def test_it_listens_where_hosts_look_for_it_alone():
    lifeline = Lifeline("127.0.0.1")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", lifeline.address[1]), timeout=10)
    lifeline.close()


def test_others_who_come_and_go_leave_nothing(monkeypatch):
    """Connections of a port scanner, closed or not, use up neither files nor places."""
    monkeypatch.setattr("jaxrl.cluster.lifeline.MOST", 3)
    lifeline = Lifeline("127.0.0.1")
    host = start(HOST, lifeline.address[1])
    assert host.stdout.readline() == "held\n"
    for _ in range(50):
        socket.create_connection(lifeline.address, timeout=10).close()
    stay = [socket.create_connection(lifeline.address, timeout=10) for _ in range(5)]
    ended = [end.recv(1) for end in stay[2:]]  # the host and two of these are three
    assert ended == [b""] * 3
    assert len(lifeline._held) == 3
    assert host.poll() is None
    lifeline.close()
    assert host.wait(60) == 1
