"""A server on loopback that answers each question with the next of some faults, or well."""

import contextlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class JsonServer(ThreadingHTTPServer):
    """Answers POST with `answer(question)`.

    Attributes:
        faults: what comes before that, first to last: a status, bytes (sent as they are, with
            status 200), "hang" (no answer until the server stops), "drip" (a byte now and then),
            "slow headers" (one now and then), "reset" (the connection is closed), "cut" (it is
            closed in the middle), "endless" (more than anyone wants), or a dict of a `status` and
            `headers`. Whatever stays is repeated if `endless`.
        questions: what was asked; with the header Authorization, under its name.
        most: requests that were answered at the same time.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, answer, faults=(), endless=False, seconds=0.0):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.faults, self.endless, self.seconds = answer, [*faults], endless, seconds
        self.questions, self.keys, self.most, self.now = [], [], 0, 0
        self.lock, self.stopped = threading.Lock(), threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        """Clients that hang up are what is tested."""


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.questions.append(question)
            server.keys.append(self.headers.get("Authorization"))
            server.now += 1
            server.most = max(server.most, server.now)
            fault = server.faults[0] if server.faults else None
            if server.faults and not server.endless:
                server.faults.pop(0)
        time.sleep(server.seconds)
        try:
            self.answer_with(fault, question)
        finally:
            with server.lock:
                server.now -= 1

    def answer_with(self, fault, question):
        if fault == "hang":
            self.server.stopped.wait(60)
        elif fault == "reset":
            self.connection.shutdown(socket.SHUT_RDWR)
        elif fault == "cut":
            self.say(200, b'{"result": [', length=1000)
        elif fault in ("drip", "slow headers", "endless"):
            self.never_end(fault)
        elif isinstance(fault, dict):
            self.say(fault["status"], b"later", headers=fault["headers"])
        elif isinstance(fault, int):
            self.say(fault, b"a fault of the test")
        elif isinstance(fault, bytes):
            self.say(200, fault)
        else:
            self.say(200, json.dumps(self.server.answer(question)).encode())

    def never_end(self, fault):
        self.send_response(200)
        if fault == "slow headers":
            while not self.server.stopped.wait(0.05):
                self.send_header("X-More", "to come")
                self.flush_headers()
        self.end_headers()
        part, pause = (b" ", 0.05) if fault == "drip" else (b" " * 2**20, 0)
        while not self.server.stopped.wait(pause):
            self.wfile.write(part)

    def say(self, status, body, length=None, headers=()):
        self.send_response(status)
        self.send_header("Content-Length", str(length or len(body)))
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def serving(server):
    """The server answers in a thread; afterwards nothing of it is left."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        getattr(server, "stopped", threading.Event()).set()
        server.shutdown()
        server.server_close()
        thread.join()


def closed_url():
    """Where nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{found.getsockname()[1]}"
