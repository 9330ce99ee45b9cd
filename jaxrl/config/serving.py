"""Config of the HTTP server: `python -m jaxrl.serve`, and the endpoint beside a training run."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from jaxrl.config.constraints import must, not_negative, positive, variable
from jaxrl.config.dataclass_config import BaseConfig


def _are_networks(names: Sequence[str]) -> bool:
    try:
        return all(ipaddress.ip_network(name) for name in names)
    except ValueError:
        return False


@dataclass
class ServeConfig(BaseConfig):
    """Hold the settings of serving over HTTP.

    Address and model name are those of generator.inference_engine.
    """

    grpc_port: int | None = None
    """Port on which `jaxrl.serve` also answers JetStream's clients; None = on none."""
    token_env: Annotated[str, variable] = "JAXRL_SERVE_TOKEN"
    """Environment variable that holds the token which every request must carry."""
    token_file: str | None = None
    """File that holds the token, instead of the environment variable."""
    weights_root: str | None = None
    """Folder, or address in a bucket, under which /update_weights may read; None = no update over
    HTTP."""
    receive_weights: bool = False
    """/receive_weights may pull weights from the host that a request comes from."""
    weight_networks: Annotated[
        list[str],
        must(_are_networks, 'must be networks such as "10.0.0.0/8"'),
    ] = field(default_factory=list)
    """Networks from whose hosts it may, too: the trainer's other hosts, and other servers."""
    answer_format: Annotated[
        str,
        must(lambda name: name in ("text", "tags") or ":" in name, "must be text, tags or a path"),
    ] = "text"
    """How answers of chats are read: "text", as they are; "tags", `<think>..</think>` as
    reasoning_content and `<tool_call>{..}</tool_call>` as tool_calls; or a function of yours,
    "my_pkg.my_module:function", from a text, and whether it may call tools, to
    `answer_formats.Said`."""
    max_num_seqs: Annotated[int, positive] = 32
    """Samples decoded together by `jaxrl.serve`, over all engines."""
    max_model_len: Annotated[
        int | None,
        must(lambda tokens: tokens is None or tokens >= 2, "must hold a prompt and an answer"),
    ] = None
    """Most tokens of prompt and answer in `jaxrl.serve`; None = the longest row of training."""
    steps_per_dispatch: Annotated[int, positive] = 8
    """Tokens between two pieces of a stream in `jaxrl.serve`."""
    max_body_bytes: Annotated[int, positive] = 4 * 1024**2
    """Longest body of a request."""
    max_connections: Annotated[int, positive] = 2048
    """Connections at a time, also without a request; one beyond them is answered 503."""
    max_samples: Annotated[int, positive] = 1024
    """Samples that run or wait; a request beyond them is answered 429."""
    max_samples_per_request: Annotated[int, positive] = 128
    """Most samples of one request, over all of its prompts."""
    request_seconds: Annotated[float, positive] = 600.0
    """Longest time of a request."""
    max_sessions: Annotated[int, positive] = 4096
    """Conversations (X-Session-ID) that are kept; the one used least lately goes first."""
    max_session_tokens: Annotated[int, positive] = 4 * 1024**2
    """Tokens that all kept conversations hold together; the one used least lately goes first."""
    session_seconds: Annotated[float, positive] = 3600.0
    """How long a conversation that nobody uses is kept."""


@dataclass
class TinkerConfig(BaseConfig):
    """Hold the settings of the training service, `jaxrl.tinker`.

    The base is trainer.policy.model, the address that of generator.inference_engine; `serve` says
    how many samples decode together, how long a sequence and a body may be.
    """

    root: str = "runs/tinker"
    """Folder of all that the service must not lose: its journal, models and checkpoints."""
    keys_file: str | None = None
    """File with the API keys that are let in, one in each line, which begin with "tml-"; None = any
    key, from programs of this machine."""
    max_rank: Annotated[int, positive] = 32
    """Largest rank of an adapter; all take as much memory as one of this rank."""
    adapters: Annotated[int, positive] = 16
    """Models that are trained on the devices at a time; others wait in memory, then on disk."""
    samplers: Annotated[int, positive] = 16
    """Adapters that are sampled from at a time."""
    host_adapters: Annotated[int, not_negative] = 64
    """Models that wait in memory."""
    max_models: Annotated[int, positive] = 256
    """Models of a key."""
    max_waiting: Annotated[int, positive] = 1024
    """Calls of a key that are not answered yet; one beyond them is answered 429."""
    row_tokens: Annotated[int, positive] = 2048
    """Tokens of a row of a call with many data. More fill the device better, and are padded more;
    on a CPU, where attention goes through all of a row, 256 is faster for short data."""
    snapshot_calls: Annotated[int, positive] = 16
    """Calls of a model after which it is written to disk; more make the start after a crash
    slower."""
    answer_seconds: Annotated[float, positive] = 86400.0
    """How long answers are kept for clients that ask again."""
    session_seconds: Annotated[float, positive] = 604800.0
    """How long a session is there of which nothing is heard; then its models are forgotten, not
    their checkpoints."""
