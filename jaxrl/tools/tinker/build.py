"""From a config to the service and its server."""

import asyncio
import dataclasses
import hashlib
import json
import math
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax

from jaxrl import config as cfg
from jaxrl.config.model_limits import check_ids, warn_of_positions
from jaxrl.config.platform_defaults import settle
from jaxrl.data.tokenizer import known_ids, load_tokenizer
from jaxrl.files import writable_folder
from jaxrl.hub import check_folder
from jaxrl.models import hf
from jaxrl.models.architecture import keeps_states, with_known_ids
from jaxrl.models.export import untied
from jaxrl.models.lora import LoraConfig, select_modules
from jaxrl.models.placement import model_shardings, place_model
from jaxrl.models.transformer import abstract_params
from jaxrl.parallel import Placement, make_mesh
from jaxrl.parallel.checksums import checksums
from jaxrl.parallel.compilation import enable_cache
from jaxrl.parallel.devices import device_memory
from jaxrl.rollout.build import native_engine
from jaxrl.tools.tinker.journal import Journal
from jaxrl.tools.tinker.keys import Keys, read_keys
from jaxrl.tools.tinker.samplers import Samplers
from jaxrl.tools.tinker.service import Service
from jaxrl.tools.tinker.tenants import Tenants
from jaxrl.training.build import make_forward_pass

MATRICES = {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")} | {"lm_head"}


class Server:
    """Serve in a thread of its own, from `start` to `stop`.

    Args:
        service: does what is asked.
        keys: who may ask.
        config: limits, and the address.
    """

    def __init__(self, service: Service, keys: Keys, config: cfg.TrainConfig) -> None:
        self.service, self._keys, self._config = service, keys, config
        self.url = ""
        self._loop, self._stopping = asyncio.new_event_loop(), asyncio.Event()
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="jaxrl-tinker-http", daemon=True)

    def start(self) -> None:
        """Begin to listen, and to work.

        Raises:
            OSError: the address is not to be had.
        """
        self._thread.start()
        self._started.result()

    def join(self) -> None:
        """Wait for the end.

        Raises:
            Exception: a program failed; the service is to be begun again.
        """
        self._thread.join()
        if self.service.died.done():
            self.service.died.result()

    def stop(self) -> None:
        """End both; what is not done is done when the service begins again."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        from jaxrl.rollout.server.listening import listening
        from jaxrl.tools.tinker.app import TinkerRoutes

        settings, limits = self._config.generator.inference_engine, self._config.tinker
        self.routes = TinkerRoutes(
            self.service,
            self._keys,
            most_bytes=self._config.serve.max_body_bytes,
            most_waiting=limits.max_waiting,
            most_models=limits.max_models,
        )
        host = settings.http_endpoint_host
        serving = listening(
            self.routes.app(),
            host,
            settings.http_endpoint_port,
            most=self._config.serve.max_connections,
            shutdown_timeout=5,
        )
        try:
            async with serving as (_, port):
                self.url = f"http://{host}:{port}"
                self.service.died.add_done_callback(
                    lambda _: self._loop.call_soon_threadsafe(self._stopping.set)
                )
                self._started.set_result(None)
                await self._stopping.wait()
        finally:
            await asyncio.to_thread(self.service.stop)
            self.service.journal.close()


def make_server(config: Any) -> Server:
    """Build the service of the model that a config names, to be started.

    Raises:
        ValueError: the config or the model folder is wrong, no key protects the server, or the
            adapters do not fit.
    """
    config, _ = settle(cfg.resolve(cfg.to_train_config(config)))
    trainer, settings, serve = config.trainer, config.generator.inference_engine, config.serve
    limits, path = config.tinker, trainer.policy.model.path
    if path is None:
        raise ValueError("trainer.policy.model.path=None: set a Hugging Face model folder")
    if trainer.exact != "off":
        raise ValueError(
            f"trainer.exact={trainer.exact!r}: an engine whose rows have adapters of their own is "
            "not exact; set off"
        )
    cfg.check_constraints(serve, "serve")
    cfg.check_constraints(limits, "tinker")
    keys = Keys(read_keys(limits.keys_file, settings.http_endpoint_host))
    root = Path(writable_folder("tinker.root", limits.root))
    enable_cache(trainer.compilation_cache_path)
    check_folder("trainer.policy.model.path", path)
    tokenizer: Any = load_tokenizer(path, None)
    model = hf.load_config(path, cfg.model_overrides(trainer, trainer.policy))
    if model.experts is not None or keeps_states(model) or model.latent is not None:
        raise ValueError(
            f"trainer.policy.model.path={path!r}: this model has experts, states or latents, whose "
            "matrices rows of a batch cannot have adapters of their own for yet"
        )
    ends = hf.eos_sources(path)
    check_ids("trainer.policy.model.path", path, model.vocab_size, tokenizer, ends)
    length = serve.max_model_len or cfg.longest_row(config)
    of_model = hf.max_positions(path), path
    warn_of_positions("serve.max_model_len", length, "a row may have", length, *of_model)
    mesh = make_mesh(**dataclasses.asdict(trainer.policy.mesh))
    placement = place_model(model, mesh, cfg.sharding_rules(trainer.sharding_rules))
    # the head has an adapter and the embeddings have none, so that they are two
    own_head = dataclasses.replace(model, tie_embeddings=False)
    lora = LoraConfig(own_head, _matrices(own_head), rank=limits.max_rank, alpha=limits.max_rank)
    resident = _check_memory(limits, lora, placement)
    base = hf.load_or_init(
        hf.local_folder(path),
        model,
        overrides=cfg.model_overrides(trainer, trainer.policy),
        random_init=trainer.policy.model.random_init,
        seed=trainer.seed,
        shardings=model_shardings(model, placement),
    )
    model, base = untied(model, base)
    base = jax.device_put(base, model_shardings(model, placement))
    journal = Journal(root / "journal.db")
    numbers = json.dumps(checksums(base), sort_keys=True)
    about = {
        "max_rank": limits.max_rank,
        "matrices": hashlib.sha256("\n".join(lora.modules).encode()).hexdigest(),
        "base": hashlib.sha256(numbers.encode()).hexdigest(),
        "known_ids": max([known_ids(tokenizer), *(end + 1 for end in ends)]),
    }
    if (other := journal.belong_to(about)) is not None:
        raise ValueError(
            f"tinker.root={limits.root!r} is of a service with another {other}: go on with that "
            "one, or choose another folder"
        )
    model = with_known_ids(model, journal.service.get("known_ids"))  # not where it began without
    vocabulary = model.known_ids or model.vocab_size
    trainer.algorithm.temperature = 1.0  # what the API calls log-probs are the model's own
    forward = make_forward_pass(config, model, placement).forward
    tenants = Tenants(forward, base, lora, placement, limits.adapters + 1)
    places = limits.samplers + 1
    engine = native_engine(
        settings,
        model,
        make_mesh(devices=jax.devices()[:1]),
        rows=serve.max_num_seqs,
        max_model_len=length,
        decode_text=tokenizer.decode,
        steps_per_dispatch=serve.steps_per_dispatch,
        shrink=False,  # what a sample draws does not depend on who else is there
        lora=lora,
        places=places,
        resident_bytes=resident,
    )
    engine.update_weights(base, 0)
    stops = sorted({tokenizer.eos_token_id, *ends} - {None})
    service = Service(
        journal,
        root,
        tenants,
        Samplers(engine, places, stops, vocabulary, length),
        base=settings.served_model_name or Path(path).name,
        folder=str(Path(path).absolute()),
        vocabulary=vocabulary,
        longest=length,
        full=limits.row_tokens,
        snapshot=limits.snapshot_calls,
        on_host=limits.host_adapters,
        most_ahead=limits.max_waiting,
        answer_seconds=limits.answer_seconds,
        session_seconds=limits.session_seconds,
    )
    return Server(service, keys, config)


def _matrices(model: Any) -> tuple[str, ...]:
    names = select_modules(model, ["all-linear", "lm_head"])
    return tuple(name for name in names if name.rpartition(".")[2] in MATRICES)


def _check_memory(limits: cfg.TinkerConfig, lora: LoraConfig, placement: Placement) -> int:
    """Return the bytes of the base and of all adapters on a device, without the engine's copy.

    Raises:
        ValueError: a device has less; says how much is missing.
    """

    def of_device(model: Any) -> int:
        shapes, places = abstract_params(model), model_shardings(model, placement)
        parts = jax.tree.map(lambda x, where: math.prod(where.shard_shape(x.shape)), shapes, places)
        return 4 * sum(jax.tree.leaves(parts))

    one, base = of_device(lora), of_device(lora.model)
    asked = base + 4 * one * (limits.adapters + 1) + one * (limits.samplers + 1)
    has = device_memory(placement.mesh.devices.flat[0])
    if asked > has:
        raise ValueError(
            f"tinker.adapters={limits.adapters}, tinker.samplers={limits.samplers}, "
            f"tinker.max_rank={limits.max_rank}: the base, adapters, gradients and moments need "
            f"{asked / 2**30:.2f} GiB, {(asked - has) / 2**30:.2f} more than a device has; lower "
            "one"
        )
    return asked
