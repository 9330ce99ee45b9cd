"""vLLM servers of our own: started, watched, started again, and ended with this process."""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl.rollout.remote.server_process import LOOPBACK, POLL_SECONDS, ServerProcess, free_port

MODULE = "vllm.entrypoints.openai.api_server"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of --max-lora-rank


@dataclass
class VllmServer(ServerProcess):
    """Run one vLLM server process, which loads the weights that are newest when it starts.

    Attributes:
        flags: of vLLM's command line, by their names in Python, e.g. {"max_model_len": 1024}.
        log: file that gets what the server prints.
        python: interpreter that has vllm.
        devices: value of CUDA_VISIBLE_DEVICES; None = as in this process.
        start_seconds: until it must answer.
        port: where it listens; a free one.
    """

    flags: Mapping[str, Any]
    log: Path
    python: str = sys.executable
    devices: str | None = None
    start_seconds: float = 1200.0
    port: int = field(default_factory=free_port)

    kind = "vLLM"

    @property
    def url(self) -> str:
        """Return the server's address."""
        return f"http://{LOOPBACK}:{self.port}"

    def command(self, folder: Path) -> list[str]:
        """Return the command line that serves the weights of a folder.

        Requests carry no model name, log-probs are those after temperature and filters, and no
        defaults for sampling are read from the folder.
        """
        fixed = {
            "model": str(folder),
            "host": LOOPBACK,
            "port": self.port,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
        }
        return [self.python, "-m", MODULE, *command_line({**self.flags, **fixed})]

    async def ensure(self, folder: Path) -> bool:
        """Have the server run; return True if it had to be started.

        It is started with the weights of `folder`.

        Raises:
            ServerError: it ended, or does not answer; with the end of its log.
        """
        if self.runs:
            return False
        # the calls that load adapters, or weights (/collective_rpc)
        calls = (
            "ALLOW_RUNTIME_LORA_UPDATING" if self.flags.get("enable_lora") else "SERVER_DEV_MODE"
        )
        environment = {**os.environ, f"VLLM_{calls}": "1"}
        if self.devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.devices
        await self._start(self.command(folder), environment, lambda: _healthy(self.port))
        return True


def lora_flags(rank: int) -> dict[str, Any]:
    """Return the flags of a server that takes adapters.

    Two side by side: after an update requests with the old one go on beside those with the new.

    Raises:
        ValueError: vLLM takes none of that rank.
    """
    enough = next((most for most in LORA_RANKS if most >= rank), None)
    if enough is None:
        raise ValueError(
            f"trainer.policy.model.lora.rank={rank}: vLLM takes adapters of rank {LORA_RANKS[-1]} "
            "at most; choose that or less, or set trainer.policy.model.lora.lora_sync_path to None"
        )
    return {"enable_lora": True, "max_lora_rank": enough, "max_loras": 2}


def command_line(flags: Mapping[str, Any]) -> list[str]:
    """Write keyword arguments as flags: true and false as --flag and --no-flag, None as nothing."""
    words: list[str] = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, (list, tuple)):
            words += [f"--{flag}", *map(str, value)]
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            words += [f"--{flag}", text]
    return words


async def _healthy(port: int) -> bool:
    """Return whether GET /health gives 200."""
    try:
        async with asyncio.timeout(POLL_SECONDS * 10):
            reader, writer = await asyncio.open_connection(LOOPBACK, port)
            writer.write(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")
            status = (await reader.readline()).split()
            writer.close()
    except (OSError, TimeoutError):
        return False
    return status[1:2] == [b"200"]
