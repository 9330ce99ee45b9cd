"""The server with an engine that says what it is told to: no model, nothing to compile."""

import contextlib
import threading

from jaxrl.config import ServeConfig
from jaxrl.rollout.native.slots import Sample
from jaxrl.rollout.server.served_model import ServedModel
from jaxrl.rollout.server.server import HttpServer


class TypingEngine:
    """Answers every request with the same tokens, in pieces; the log-prob of each is -1.

    Its weights are whatever they are updated with; `updates` has them, with their versions. While
    `halted`, samples stay open.
    """

    def __init__(self, tokens=(), piece=3, decode=None):
        self.tokens, self.piece, self.decode = list(tokens), piece, decode
        self.updates, self.halted, self.open = [], False, []
        self._lock = threading.Lock()

    def submit(self, requests):
        groups = []
        for request in requests:
            samples = [
                Sample(request, 0, key, request.sampling.max_tokens, number)
                for number, key in enumerate(request.keys)
            ]
            groups.append([sample.future for sample in samples])
            with self._lock:
                self.open += samples
        if not self.halted:
            self.speak()
        return groups

    def speak(self):
        """End what is open."""
        with self._lock:
            samples, self.open = self.open, []
        for sample in samples:
            self._speak(sample)

    def _speak(self, sample):
        for start in range(0, len(self.tokens), self.piece):
            new = self.tokens[start : start + self.piece]
            if sample.take(new, [-1.0] * len(new), 0, self.decode):
                break
            if tell := sample.report():
                tell()
        if sample.outcome is None:
            sample.finish("length")
        sample.hand_over()

    def update_weights(self, params, version):
        self.updates.append((params, version))

    def pause(self):
        self.halted = True

    def resume(self):
        self.halted = False
        self.speak()

    def sleep(self):
        self.updates.append("asleep")


@contextlib.contextmanager
def serving(engine, tokenizer, weights=None, answer_format=None, params="first", **limits):
    """A server of the engine on loopback, with weights of version 0."""
    stops = (tokenizer.eos_token_id,)
    served = ServedModel(
        "org/policy", tokenizer, len(tokenizer), 4096, stops, answer_format=answer_format
    )
    server = HttpServer(engine, served, ServeConfig(**limits), weights=weights)
    server.host.update_weights(params, 0)
    server.start()
    try:
        yield server
    finally:
        server.stop()
