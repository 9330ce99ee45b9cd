"""What the server counts, for Prometheus."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Measures:
    """Hold the counters of one server, in a registry of their own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter(
            "jaxrl_requests", "Answered requests.", ["route", "status"], registry=registry
        )
        self.prompt_tokens = Counter("jaxrl_prompt_tokens", "Prompt tokens.", registry=registry)
        self.tokens = Counter("jaxrl_generated_tokens", "Sampled tokens.", registry=registry)
        self.session_tokens = Counter(
            "jaxrl_session_tokens",
            "Sampled tokens of sessions, in their first branch and in others.",
            ["branch"],
            registry=registry,
        )
        self.session_branches = Counter(
            "jaxrl_session_branches",
            "Samples of sessions that began a branch other than the first.",
            registry=registry,
        )
        self.cancelled = Counter(
            "jaxrl_cut_short_requests", "Their client left, or time was over.", registry=registry
        )
        self.samples = Gauge("jaxrl_samples", "Samples that run or wait.", registry=registry)
        self.version = Gauge("jaxrl_policy_version", "Of the weights.", registry=registry)
        self.first_token = Histogram(
            "jaxrl_first_token_seconds", "From the request to its first token.", registry=registry
        )
        self.seconds = Histogram(
            "jaxrl_request_seconds", "From a request for samples to its end.", registry=registry
        )

    def text(self) -> bytes:
        """Return the page that Prometheus reads."""
        return generate_latest(self.registry)


class Stopwatch:
    """Measure the times of one request.

    Args:
        measures: where they go.
    """

    def __init__(self, measures: Measures) -> None:
        self.measures, self._start, self._waiting = measures, time.perf_counter(), True

    def tokens(self, number: int) -> None:
        """Note that so many tokens were sampled."""
        if self._waiting and number:
            self.measures.first_token.observe(time.perf_counter() - self._start)
            self._waiting = False
        self.measures.tokens.inc(number)

    def stop(self) -> None:
        """Note that the request is over."""
        self.measures.seconds.observe(time.perf_counter() - self._start)
