"""Servers for tests: speak vLLM's recorded protocol or our own, over a real engine; and a router.

Tokens, log-probs and weights are real; faults are put in by the test.
"""

import asyncio
import dataclasses
import functools
import itertools
import threading
from collections import Counter, deque
from pathlib import Path

import aiohttp
import jax
from aiohttp import web

from jaxrl.models import hf
from jaxrl.models.linear import merge
from jaxrl.models.lora import attach
from jaxrl.models.peft_format import load_adapter
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Request, Sampling
from tests.rollout.test_native import reserve

SETTINGS = (
    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "logprobs"),
)


@functools.cache
def engine_of(config, number):
    """One for each server of a test; kept, because it holds the compiled functions."""
    one = make_mesh(devices=jax.devices()[:1])
    engine = NativeEngine(config, one, max_num_seqs=16, steps_per_dispatch=8, shrink=False)
    reserve(engine)
    return engine


class HttpThread:
    """An aiohttp application in a thread, between `listen` and `end`, at the same port each time.

    `handlers` gives it its routes, `middlewares` what stands before them.
    """

    port, middlewares = 0, ()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def listen(self):
        ready = threading.Event()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self.thread.start()
        assert ready.wait(30)

    def end(self):
        """Connections break."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(30)

    def _run(self, ready):
        app = web.Application(middlewares=self.middlewares)
        app.router.add_routes(self.handlers())
        runner = web.AppRunner(app, shutdown_timeout=0.01)

        async def serve():
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True)
            await site.start()
            self.port = site._server.sockets[0].getsockname()[1]
            ready.set()

        async def end():
            for connection in list(runner.server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
            await runner.cleanup()

        self.loop.run_until_complete(serve())
        self.loop.run_forever()
        self.loop.run_until_complete(end())
        self.loop.close()


class FakeServer(HttpThread):
    """Runs in a thread between `start` and `kill`.

    Attributes:
        faults: path -> what befalls its next calls: a status, "truncated", "drop", "hang".
        stale: weights are taken but not used.
        log_prob_error: added to every log-prob.
        raw: log-probs are those before temperature and filters, as vLLM's are by default.
        calls: number of calls by path.
        served: samples that were answered.
    """

    def __init__(self, dialect, config, params, number=0):
        self.dialect, self.config, self.params = dialect, config, params
        self.engine = engine_of(config, number)
        self.faults, self.calls, self.bodies = {}, Counter(), []
        self.stale, self.log_prob_error, self.raw, self.served = False, 0.0, False, 0
        self.middlewares = [self._fault]
        self.start()

    def start(self):
        """With the weights of the beginning, as after a crash."""
        self.engine.update_weights(self.params, -1)
        self.engine.resume()
        self.listen()
        return self

    def kill(self):
        """Connections break; nothing is remembered."""
        if not self.thread.is_alive():
            return
        self.end()
        self.engine.resume()
        self.engine.abort()

    def handlers(self):
        return [
            web.get("/health", self._health),
            web.post("/v1/completions", self._completions),
            web.post("/update_weights", self._update_weights),
            web.post("/collective_rpc", self._collective_rpc),
            web.post("/pause", self._pause),
            web.post("/resume", self._resume),
            web.post("/reset_prefix_cache", self._nothing),
        ]

    @web.middleware
    async def _fault(self, request, handler):
        self.calls[request.path] += 1
        faults = self.faults.get(request.path) or deque()
        fault = faults.popleft() if faults else None
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "drop":
            request.transport.abort()
        if isinstance(fault, int):
            headers = {"Retry-After": "0.01"} if fault == 429 else {}
            error = {"error": {"message": "planted", "code": fault}}
            return web.json_response(error, status=fault, headers=headers)
        if callable(fault):
            fault()
        answer = await handler(request)
        if fault == "truncated":
            return web.Response(text=answer.text[: len(answer.text) // 2])
        return answer

    async def _health(self, request):
        return web.json_response({"status": "ok", "version": self.engine.version})

    async def _nothing(self, request):
        return web.Response()

    async def _pause(self, request):
        assert request.query["mode"] == "keep"
        self.engine.pause()
        return web.Response()

    async def _resume(self, request):
        self.engine.resume()
        return web.Response()

    async def _collective_rpc(self, request):
        body = await request.json()
        assert body["method"] == "reload_weights"
        await self._load(body["kwargs"]["weights_path"], self.engine.version + 1)
        return web.json_response({"results": [None]})

    async def _update_weights(self, request):
        body = await request.json()
        await self._load(body["path"], body["version"])
        return web.json_response({"version": body["version"]})

    async def _load(self, folder, version):
        config = hf.load_config(folder)  # vLLM gets a head of its own
        assert dataclasses.replace(config, tie_embeddings=True) == self.config
        assert self.dialect == "vllm" or config == self.config
        params = self.params if self.stale else hf.load_params(folder, config)
        await asyncio.to_thread(self.engine.update_weights, params, version)

    async def _completions(self, request):
        body = await request.json()
        self.bodies.append(body)
        sampling = Sampling(
            **{name: body[name] for name in SETTINGS},
            stop_token_ids=tuple(body["stop_token_ids"]),
            raw_log_probs=self.raw,
        )
        if self.dialect == "vllm":
            seed, first = divmod(body["seed"], 2**32)
            keys = [(seed, first + i) for i in range(body["n"])]
        else:
            keys = [tuple(key) for key in body["keys"]]
        asked = Request(tuple(body["prompt"]), tuple(keys), sampling)
        futures = self.engine.submit([asked])[0]
        try:
            samples = await asyncio.gather(*map(asyncio.wrap_future, futures))
        finally:
            for future in futures:
                future.cancel()
        self.served += len(samples)
        choices = [self._choice(i, sample) for i, sample in enumerate(samples)]
        return web.json_response({"choices": choices[::-1]})  # any order will do

    def _choice(self, index, sample):
        top = [
            {f"token_id:{token}": x for token, x in place.items()} for place in sample.top_log_probs
        ]
        choice = {
            "index": index,
            "token_ids": sample.tokens,
            "finish_reason": sample.stop_reason,
            "stop_reason": sample.stop_string,
            "logprobs": {
                "token_logprobs": [
                    x + self.log_prob_error
                    for x in (sample.raw_log_probs if self.raw else sample.log_probs)
                ],
                "top_logprobs": top or None,
            },
        }
        return choice | ({} if self.dialect == "vllm" else {"versions": sample.versions})


class FakeAdapterServer(FakeServer):
    """vLLM 0.32 with --enable-lora: its answers, as they were recorded.

    Adapters are read for every request, as vLLM does where it has had to put them aside.

    Attributes:
        params: of the base.
        adapters: name -> folder.
        max_lora_rank: as vLLM's flag.
        holds: events; the next requests wait for one each when they have found their adapter.
    """

    max_lora_rank = 8

    def __init__(self, config, params, number=0):
        self.holds = deque()
        super().__init__("vllm", config, params, number)

    def start(self):
        """With the base alone, as after a crash."""
        self.adapters, self.one_by_one = {}, asyncio.Lock()
        return super().start()

    def handlers(self):
        return [
            web.get("/health", self._health),
            web.post("/v1/completions", self._completions),
            web.get("/v1/models", self._models),
            web.post("/v1/load_lora_adapter", self._load_adapter),
            web.post("/v1/unload_lora_adapter", self._unload_adapter),
        ]

    async def _models(self, request):
        cards = [{"id": "base", "parent": None}]
        cards += [{"id": name, "parent": "base"} for name in self.adapters]
        return web.json_response({"object": "list", "data": cards})

    async def _load_adapter(self, request):
        body = await request.json()
        name, folder = body["lora_name"], Path(body["lora_path"])
        if name in self.adapters:
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        if not folder.exists():
            return _error(404, f"Loading lora {name} failed: No adapter found for <path>")
        lora, _ = load_adapter(folder, self.config)
        if lora.rank > self.max_lora_rank:
            said = f"LoRA rank {lora.rank} is greater than max_lora_rank {self.max_lora_rank}."
            return _error(500, f"Call to add_lora method failed: {said}")
        self.adapters[name] = folder
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_adapter(self, request):
        name = (await request.json())["lora_name"]
        if self.adapters.pop(name, None) is None:
            return _error(404, f"The lora adapter '{name}' cannot be found.")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _completions(self, request):
        name = (await request.json())["model"]
        if name not in self.adapters:
            return _error(404, f"The model `{name}` does not exist. Valid aliases: base.")
        folder = self.adapters[name]
        if self.holds:
            await asyncio.to_thread(self.holds.popleft().wait)
        async with self.one_by_one:  # our engine has one set of weights
            lora, adapters = load_adapter(folder, self.config)
            params = self.params if self.stale else merge(attach(lora, self.params, adapters))
            await asyncio.to_thread(self.engine.update_weights, params, self.engine.version + 1)
            return await super()._completions(request)


def _error(status, message):
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


class Router(HttpThread):
    """Passes requests for samples to one server after the other, and everything else to all.

    Attributes:
        calls: number of calls by path.
    """

    def __init__(self, servers):
        self.servers, self.turns, self.calls = servers, itertools.cycle(servers), Counter()
        self.listen()

    def handlers(self):
        return [web.route("*", "/{path:.*}", self._pass_on)]

    async def _pass_on(self, request):
        self.calls[request.path] += 1
        body, for_all = await request.read(), request.path != "/v1/completions"
        async with aiohttp.ClientSession() as session:
            for server in self.servers if for_all else [next(self.turns)]:
                url, headers = server.url + request.path_qs, {"Content-Type": "application/json"}
                ask = session.request(request.method, url, data=body, headers=headers)
                async with ask as answer:
                    text, status = await answer.text(), answer.status
        return web.Response(text=text, status=status)
