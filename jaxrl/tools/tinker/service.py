"""The calls of all models and samplers: accepted, in turns, and what becomes of them.

A thread does what models ask, each model's calls in the order of their numbers. Tiles of several
models go into one program, one of each owner in turn, so that a long call does not hold up short
ones. What a model is after a call is written now and then, and what comes later is done again after
a crash: the journal has it, and every number comes out the same.
"""

import functools
import hashlib
import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl.files import DamagedFile, FolderError
from jaxrl.models.lora import LoraConfig, matrices
from jaxrl.rollout.server.errors import ApiError, refuse
from jaxrl.tools.tinker import bodies, graphs, states
from jaxrl.tools.tinker.journal import DONE, FAILED, WAITS, Call, Journal, Reused, facts
from jaxrl.tools.tinker.losses import LOSSES
from jaxrl.tools.tinker.samplers import NO_LOG_PROB, Prompt, Samplers
from jaxrl.tools.tinker.tenants import PER_DISPATCH, Adam, Tenant, Tenants, new_tenant
from jaxrl.tools.tinker.tiles import Datum, Place, Tile, cut, read

_log = logging.getLogger(__name__)
ALPHA = 32.0  # of all adapters
TIDY_SECONDS = 600.0
SCHEME = "tinker://"
FOLDERS = {"training": "weights", "sampler": "sampler_weights"}  # in paths, by kind
ATTENTION, MLP, HEAD = ("wq", "wk", "wv", "wo"), ("w_gate", "w_up", "w_down"), ("unembed",)
MOVES = "forward_backward", "optim_step", "load_weights", "create_model"  # change a model
BINARY = "forward_backward", "forward", "sample"  # are answered with protobuf


@dataclass
class Model:
    """Hold what the thread knows of a model.

    Attributes:
        facts: as it was created.
        next: number of the call that is to be done next.
        calls: those that are accepted and not done, by number, with whether they were answered
            before the server last began.
        saved: the last call that is in the model's file; -1 = none is.
        slot: on the devices; None = it is not there.
        host: what it is, where it is not on the devices but in memory.
        used: when it was last.
        damage: of its file, in words; "" = none. Nothing is done with it then.
    """

    id: str
    owner: str
    facts: dict[str, Any]
    next: int = 0
    calls: dict[int, tuple[Call, int]] = field(default_factory=dict)
    saved: int = -1
    slot: int | None = None
    host: Tenant | None = None
    used: float = 0.0
    damage: str = ""


@dataclass
class Running:
    """Hold a call whose tiles are being computed.

    Attributes:
        data: of the call.
        tiles: all of them.
        places: of its data.
        then: goes on with the log-probs of all data; None = the call is at its end.
        told: numbers for the answer; None = the sum of the losses.
        done: number of tiles that are computed.
        log_probs, losses: of these.
    """

    model: Model
    call: Call
    data: list[Datum]
    tiles: list[Tile]
    places: list[Place]
    learns: bool
    then: Callable[[list[np.ndarray]], "Running | bytes"] | None = None
    told: dict[str, float] | None = None
    done: int = 0
    log_probs: list[np.ndarray] = field(default_factory=list)
    losses: list[np.ndarray] = field(default_factory=list)


class Asking(NamedTuple):
    """Hold a call for samples.

    Attributes:
        name: of the weights; "" = the base.
        load: reads them.
    """

    call: Call
    body: bodies.Sample
    name: str
    load: Callable[[], dict[str, Any]] | None


class Refused(ValueError):
    """Signal that a call cannot be done, by its own fault; its client is told why."""


class Service:
    """Do what is asked.

    Args:
        journal: of all calls.
        root: folder of models and checkpoints.
        tenants: models on the devices; the last slot is for scoring alone.
        samplers: draw samples.
        base: name of the base model.
        folder: of it, where its tokenizer is.
        vocabulary, longest: ids, and tokens of a sequence.
        full: tokens of a row with which products are at their fastest.
        snapshot: calls of a model after which what it is is written.
        on_host: models that are kept in memory beside those on the devices.
        answer_seconds: how long answers are kept.
        session_seconds: how long a session is there of which nothing is heard.

    Attributes:
        died: what ended the thread, for whoever waits for it.
    """

    def __init__(
        self,
        journal: Journal,
        root: Path,
        tenants: Tenants,
        samplers: Samplers,
        *,
        base: str,
        folder: str,
        vocabulary: int,
        longest: int,
        full: int,
        snapshot: int,
        on_host: int,
        most_ahead: int,
        answer_seconds: float,
        session_seconds: float,
    ) -> None:
        self.journal, self.root, self.tenants, self.samplers = journal, root, tenants, samplers
        self.base, self.folder = base, folder
        self.vocabulary, self.longest = vocabulary, longest
        self._full, self._snapshot, self._on_host = full, snapshot, on_host
        self._most_ahead = most_ahead
        self._answer_seconds, self._session_seconds = answer_seconds, session_seconds
        self._tidied = 0.0
        self.died: Future[None] = Future()
        self._models: dict[str, Model] = {}
        self._slots: list[Model | None] = [None] * (tenants.slots - 1)
        self._running: list[Running] = []
        self._samples: list[Call] = []
        self._ended: list[str] = []  # sessions whose models are to be forgotten
        self._served: defaultdict[str, float] = defaultdict(float)  # tiles, by owner
        self._changed, self._stopped = threading.Condition(), False
        self._told: Callable[[str], object] = lambda name: None
        self._thread = threading.Thread(target=self._work, name="jaxrl-tinker", daemon=True)

    # ---------------------------------------------------------------- from outside

    def start(self, told: Callable[[str], object]) -> None:
        """Take up what the journal has, and begin to work.

        Args:
            told: is called with the id of every call that is answered, by any thread.
        """
        self._told = told
        for name, owner, text in self.journal.rows(
            "SELECT id, owner, facts FROM models WHERE ended IS NULL"
        ):
            model = self._models[name] = Model(name, owner, facts(text))
            try:
                if (path := self._file(model)).exists():
                    model.saved = int(states.read_facts(path)["number"])
                    model.next = model.saved + 1
                sql = "SELECT COALESCE(MAX(number), -1) FROM calls WHERE target = ?"
                ((last,),) = self.journal.rows(sql, name)
                if model.saved > last:
                    raise DamagedFile(
                        f"{path} has the call {model.saved}, and the journal ends with {last}: "
                        "calls are lost; put copies of both in their place"
                    )
            except DamagedFile as error:
                self._give_up(model, error)
                continue
            later = self.journal.calls("target = ? AND number > ?", name, model.saved)
            model.calls = {call.number: (call, state) for call, state in later}
        left = "SELECT target FROM calls WHERE body IS NOT NULL"  # of models that ended meanwhile
        for (name,) in self.journal.rows(
            f"SELECT id FROM models WHERE ended IS NOT NULL AND id IN ({left})"
        ):
            self._forget(name)
        self._samples = [call for call, _ in self.journal.calls("kind = 'sample' AND state = 0")]
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what is not done is done when the server begins again."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def accept(self, call: Call, about: dict[str, Any] | None = None) -> None:
        """Write a call to the journal, from where nothing is lost, and see that it is done.

        Args:
            about: the model that it creates; None = it creates none.

        Raises:
            Reused: another call had its number, or it was done so long ago that nobody knows.
            ApiError: 400, its number leaves more out than may wait.
        """
        with self.journal.together():
            if not self.journal.accept(call):
                return
            known = self._models.get(call.target)
            if known is not None and call.kind != "sample":
                if call.number < known.next:
                    raise Reused(f"{call.id} was done long ago: number each call anew")
                if call.number - known.next > self._most_ahead:
                    fix = f"is far ahead of the next call, {known.next}: number calls one by one"
                    refuse("seq_id", call.number, fix)
            if about is not None:
                session = call.target.partition(":")[0]
                values = call.target, call.owner, session, time.time(), json.dumps(about)
                self.journal.rows("INSERT INTO models VALUES (?, ?, ?, ?, NULL, ?)", *values)
        with self._changed:
            if about is not None:
                self._models[call.target] = Model(call.target, call.owner, about)
            model = self._models.get(call.target)
            if call.kind == "sample":
                self._samples.append(call)
            elif model is not None:
                model.calls[call.number] = call, WAITS
            self._changed.notify_all()
        if model is None and call.kind != "sample":  # its session has just ended
            self._forget(call.target)

    def model(self, name: str, owner: str) -> Model:
        """Return an owner's model.

        Raises:
            ApiError: 404, there is none; 500, its file is damaged.
        """
        with self._changed:
            model = self._models.get(name)
        if model is None or model.owner != owner:
            raise ApiError(404, f"model_id={name!r}: there is no such model")
        if model.damage:
            raise ApiError(500, f"model_id={name!r}: {model.damage}")
        return model

    def missing(self, target: str) -> int | None:
        """Return the number of the call for which the later ones of a model wait; None: of none."""
        with self._changed:
            model = self._models.get(target)
            waits = model is not None and model.next not in model.calls and bool(model.calls)
            return model.next if model is not None and waits else None

    def end(self, session: str) -> None:
        """End a session: its models are forgotten, not their checkpoints."""
        sql = "UPDATE sessions SET ended = ? WHERE id = ? AND ended IS NULL"
        self.journal.rows(sql, time.time(), session)
        with self._changed:
            self._ended.append(session)
            self._changed.notify_all()

    # ---------------------------------------------------------------- the thread

    def _work(self) -> None:
        try:
            while self._round():
                pass
        except Exception as error:  # what the devices hold may be gone
            _log.exception("a program failed; the service ends")
            self.died.set_exception(error)

    def _round(self) -> bool:
        """Wait until there is something to do, and do some of it; return False when stopped."""
        self._tidy()
        with self._changed:
            while not (
                self._stopped or self._ended or self._running or self._samples or self._heads()
            ):
                if not self._changed.wait(TIDY_SECONDS):
                    return True
            if self._stopped:
                return False
            self._end_sessions()
            samples, self._samples = self._samples, []
            heads = self._heads()
        self._sample(samples)
        for model in heads:
            call, state = model.calls[model.next]
            try:
                there = self._bring(model)
            except DamagedFile as error:
                self._give_up(model, error)
                continue
            if there:
                self._guarded(call, lambda call, m=model, s=state: self._begin(m, call, s))
        if self._running:
            self._dispatch()
        return True

    def _tidy(self) -> None:
        """Forget now and then what is kept for a time."""
        if time.time() - self._tidied < TIDY_SECONDS:
            return
        self._tidied = now = time.time()
        self.expire()
        self.journal.forget_answers(now - self._answer_seconds)
        sql = "SELECT id FROM sessions WHERE ended IS NULL AND seen < ?"
        for (session,) in self.journal.rows(sql, now - self._session_seconds):
            self.end(session)

    def _end_sessions(self) -> None:
        """Forget the models of sessions that are over."""
        ended, self._ended = set(self._ended), []
        models = [m for m in self._models.values() if m.id.partition(":")[0] in ended]
        gone = {id(model) for model in models}
        self._running = [one for one in self._running if id(one.model) not in gone]
        for model in models:
            del self._models[model.id]
            if model.slot is not None:
                self._slots[model.slot] = None
            self.journal.rows("UPDATE models SET ended = ? WHERE id = ?", time.time(), model.id)
            self._file(model).unlink(missing_ok=True)
            self._forget(model.id)

    def _forget(self, target: str) -> None:
        """Answer what a model that is gone was asked; nothing of that is done again."""
        self._answer_all(target, {"error": "the session of the model is over", "category": "user"})
        self.journal.forget_bodies(target)

    def _give_up(self, model: Model, error: DamagedFile) -> None:
        """Answer what a model is asked whose file is damaged; others go on."""
        _log.error("model %s: %s", model.id, error)
        with self._changed:
            model.damage = str(error)
            model.calls.clear()
        self._answer_all(model.id, {"error": model.damage, "category": "server"})

    def _answer_all(self, target: str, answer: dict[str, str]) -> None:
        for call, _ in self.journal.calls("target = ? AND state = 0", target):
            self.journal.finish(call.id, FAILED, json.dumps(answer).encode())
            self._told(call.id)

    def _heads(self) -> list[Model]:
        """Return models with a call that is next, those first whose owners were served least."""
        busy = {id(one.model) for one in self._running}
        ready = [m for m in self._models.values() if m.next in m.calls and id(m) not in busy]
        return sorted(ready, key=lambda m: (self._served[m.owner], m.used))

    def _guarded(self, call: Call, run: Callable[[Call], object]) -> None:
        try:
            run(call)
        except (ValueError, ApiError) as error:
            self._fail(call, error)
        except Exception as error:
            _log.exception("%s %s", call.kind, call.id)
            self._finish(call, FAILED, {"error": repr(error), "category": "server"})

    def _fail(self, call: Call, error: Exception) -> None:
        """Answer a call that failed: the client can mend what is wrong, or the server's log has it.

        Of a disk that cannot be written the log alone names the path.
        """
        text, category = str(error), "server"
        if isinstance(error, DamagedFile | FolderError):
            _log.error("%s %s: %s", call.kind, call.id, error)
        elif isinstance(error, ValueError | ApiError):
            category = "user"
        if isinstance(error, FolderError):
            text = "the server cannot write to its disk; its log says why"
        self._finish(call, FAILED, {"error": text, "category": category})

    def _finish(self, call: Call, state: int, answer: bytes | dict[str, Any]) -> None:
        """Answer a call, and let its model go on to the next."""
        raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.journal.finish(call.id, state, raw)
        with self._changed:
            model = self._models.get(call.target)
            if model is not None and call.kind != "sample":
                model.calls.pop(call.number, None)
                model.next = call.number + 1
        if model is not None and call.number - model.saved >= self._snapshot:
            self._save(model, call.number)
        self._told(call.id)

    def _begin(self, model: Model, call: Call, state: int) -> None:
        """Do a call of a model, or begin it where it has tiles."""
        if state == FAILED or state == DONE and call.kind not in MOVES:
            self._finish(call, state, b"")  # it was answered, and changes nothing
        elif call.kind in ("forward_backward", "forward"):
            self._running.append(self._cut(model, call))
        else:
            self._finish(call, DONE, getattr(self, f"_{call.kind}")(model, call))

    # ---------------------------------------------------------------- tiles

    def _cut(self, model: Model, call: Call) -> Running:
        others = [self._served[one.model.owner] for one in self._running]
        # who comes back has no claim to what others had meanwhile
        served = self._served[model.owner]
        self._served[model.owner] = max(served, min(others, default=served))
        message, learns = bodies.parse_forward_backward(call.body), call.kind == "forward_backward"
        if message.loss_fn == bodies.CUSTOM:
            return self._cut_custom(model, call, message)
        loss, settings = bodies.loss_of(message)
        names = dict.fromkeys(LOSSES[loss].inputs, 1)
        data = bodies.data_of(message, names, self.vocabulary, self.longest)
        return Running(model, call, data, *self._tiles(model, data, loss, settings), learns)

    def _tiles(
        self, model: Model, data: list[Datum], loss: str, settings: Mapping[str, float]
    ) -> tuple[list[Tile], list[Place]]:
        assert model.slot is not None
        shape = {"slot": model.slot, "rows": self.tenants.rows, "full": self._full}
        return cut(data, loss, settings, **shape)

    def _cut_custom(
        self, model: Model, call: Call, message: bodies.wire.ForwardBackwardRequest
    ) -> Running:
        """Begin a call with a client's own loss, whose gradient by log-probs is pulled back.

        The second time the loss is the sum of the log-probs, each times what that is.
        """
        found = self.journal.calls("id = ? AND owner = ?", bodies.custom_of(message), model.owner)
        if not found or found[0][0].kind != "create_custom_loss" or not found[0][0].body:
            raise Refused("loss_fn_config: there is no loss of this loss_id; create it first")
        body = graphs.CreateLoss.model_validate_json(found[0][0].body)
        inputs = {one.name: one.rank for one in body.inputs[1:]}
        data = bodies.data_of(message, inputs, self.vocabulary, self.longest)

        def then(log_probs: list[np.ndarray]) -> Running | bytes:
            given = [[datum.inputs[name] for name in inputs] for datum in data]
            slopes, told = graphs.slopes_of(graphs.loss_of(body), log_probs, given)
            if call.kind == "forward":
                return bodies.forward_backward_output({"logprobs": log_probs}, told)
            pulled = [
                datum._replace(inputs={"weights": -slope})
                for datum, slope in zip(data, slopes, strict=True)
            ]
            again = self._tiles(model, pulled, "cross_entropy", {})
            return Running(model, call, pulled, *again, learns=True, told=told)

        bare = [datum._replace(inputs={}) for datum in data]
        tiles = self._tiles(model, bare, "cross_entropy", {})
        return Running(model, call, bare, *tiles, learns=False, then=then)

    def _dispatch(self) -> None:
        """Compute some tiles: of one shape, one of each owner in turn."""
        least = min(self._running, key=lambda one: self._served[one.model.owner])
        shape = least.tiles[least.done].shape

        def fits(one: Running, number: int) -> bool:
            alike = one.learns == least.learns
            return alike and number < len(one.tiles) and one.tiles[number].shape == shape

        chosen: list[Running] = []
        numbers = {id(one): one.done for one in self._running}
        while len(chosen) < PER_DISPATCH:
            can = [one for one in self._running if fits(one, numbers[id(one)])]
            if not can:
                break
            one = min(can, key=lambda one: self._served[one.model.owner])
            self._served[one.model.owner] += 1
            numbers[id(one)] += 1
            chosen.append(one)
        done: defaultdict[int, int] = defaultdict(int)
        tiles = []
        for one in chosen:
            tiles.append(one.tiles[one.done + done[id(one)]])
            done[id(one)] += 1
        try:
            log_probs, losses = self.tenants.run(tiles, learns=least.learns)
        except Exception as error:
            for one in chosen:  # when the server begins again, they are left out
                answer = {"error": f"the program failed: {error}", "category": "server"}
                self.journal.finish(one.call.id, FAILED, json.dumps(answer).encode())
            raise
        for one, of_tile, loss in zip(chosen, log_probs, losses, strict=True):
            one.log_probs.append(of_tile)
            one.losses.append(loss)
            one.done += 1
        ended = [one for one in self._running if one.done == len(one.tiles)]
        self._running = [one for one in self._running if one.done < len(one.tiles)]
        for one in ended:
            self._guarded(one.call, lambda call, one=one: self._end_of(one))

    def _of_data(self, one: Running, found: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the numbers of each datum in the shape of its targets."""
        parts = zip(read(one.places, found), one.data, strict=True)
        return [x if x.ndim == 1 else x[:, : d.targets.shape[1]] for x, d in parts]

    def _end_of(self, one: Running) -> None:
        """Answer a call whose tiles are all computed, or go on with it."""
        log_probs = self._of_data(one, one.log_probs)
        if one.then is not None:
            after = one.then(log_probs)
            if isinstance(after, Running):
                self._running.append(after)
            else:
                self._finish(one.call, DONE, after)
            return
        columns, told = {"logprobs": log_probs}, one.told
        if told is None:
            columns["elementwise_loss"] = losses = self._of_data(one, one.losses)
            told = {"loss:sum": sum(float(x.sum(dtype=np.float64)) for x in losses)}
        self._finish(one.call, DONE, bodies.forward_backward_output(columns, told))

    # ---------------------------------------------------------------- calls of models

    def _create_model(self, model: Model, call: Call) -> dict[str, Any]:
        return {"type": "create_model", "model_id": model.id}

    def _optim_step(self, model: Model, call: Call) -> dict[str, Any]:
        body = bodies.OptimStep.model_validate_json(call.body)
        assert model.slot is not None
        found = self.tenants.update(model.slot, Adam(**body.adam_params.model_dump()))
        metrics = {k: x for k, x in found.items() if np.isfinite(x)}
        return {"type": "optim_step", "metrics": metrics}

    def _save_weights(self, model: Model, call: Call) -> dict[str, Any]:
        body = bodies.SaveWeights.model_validate_json(call.body)
        path = self._checkpoint(
            model, call, "training", body.path, body.ttl_seconds, body.user_metadata, body.overwrite
        )
        return {"type": "save_weights", "path": path}

    def _save_weights_for_sampler(self, model: Model, call: Call) -> dict[str, Any]:
        body = bodies.SaveForSampler.model_validate_json(call.body)
        name = body.path or ("inflight" if body.kind == "inflight" else f"call-{call.number}")
        given = body.ttl_seconds, body.user_metadata
        path = self._checkpoint(model, call, "sampler", name, *given, body.kind == "inflight")
        if body.path is not None:
            return {"type": "save_weights_for_sampler", "path": path}
        session = model.id.partition(":")[0]
        name = f"{session}:sample:{body.sampling_session_seq_id}"
        self.open_sampler(name, model.owner, session, path)
        return {"type": "save_weights_for_sampler", "sampling_session_id": name}

    def open_sampler(self, name: str, owner: str, session: str, path: str) -> None:
        """Write down what a sampler samples from; it stays what it is."""
        sql = "INSERT OR IGNORE INTO samplers (id, owner, session, path) VALUES (?, ?, ?, ?)"
        self.journal.rows(sql, name, owner, session, path)

    def _load_weights(self, model: Model, call: Call) -> dict[str, Any]:
        body = bodies.LoadWeights.model_validate_json(call.body)
        parts = self._read(body.path, model.owner, "training")
        assert model.slot is not None
        now = self.tenants.take(model.slot)
        now = now.replace(adapters=parts["adapters"], scale=parts["scale"])
        zeros = {name: _zeros(now.adapters) for name in ("gradients", "mu", "nu")}
        now = now.replace(**zeros, count=np.int32(0))
        if body.optimizer:
            now = now.replace(mu=parts["mu"], nu=parts["nu"], count=parts["count"])
        self.tenants.put(model.slot, now)
        self._save(model, call.number)  # what it has read may be gone when it is done again
        return {"type": "load_weights", "path": body.path}

    # ---------------------------------------------------------------- checkpoints

    def _checkpoint(
        self,
        model: Model,
        call: Call,
        kind: str,
        name: str,
        ttl: int | None,
        metadata: dict[str, Any],
        overwrite: bool,
    ) -> str:
        """Write what a model is under a name, and return its path."""
        path = f"{SCHEME}{model.id}/{FOLDERS[kind]}/{name}"
        known = self.journal.rows("SELECT call FROM checkpoints WHERE path = ?", path)
        if known and not overwrite and known[0][0] != call.id:
            raise Refused(f"path={name!r}: {path} is there already; choose another name")
        assert model.slot is not None
        tenant = self.tenants.take(model.slot)
        if kind == "sampler" and not _finite(tenant.adapters):
            raise Refused("the model has weights that are not finite: nothing can be sampled")
        parts = states.TRAINING if kind == "training" else states.SAMPLING
        if missing := states.missing_space(self.root, tenant, parts):
            raise Refused(f"path={name!r}: the server's disk lacks {missing} bytes for it")
        size = states.write(self.file_of(path), tenant, parts, call=call.id, **model.facts["lora"])
        now = time.time()
        about = {"metadata": metadata, "model": model.facts}
        values = path, model.owner, model.id, kind, call.id, size, now, ttl and now + ttl
        sql = f"INSERT OR REPLACE INTO checkpoints VALUES ({', '.join('?' * 9)})"
        self.journal.rows(sql, *values, json.dumps(about))
        return path

    def file_of(self, path: str) -> Path:
        """Return the file of a checkpoint."""
        model, folder, name = path.removeprefix(SCHEME).split("/")
        return self.root / "checkpoints" / model / folder / f"{name}.safetensors"

    def checkpoint(self, path: str, owner: str, kind: str | None = None) -> tuple[str, dict]:
        """Return the call that wrote an owner's checkpoint, and its facts.

        Raises:
            Refused: there is none, or it is of another kind.
        """
        self.expire()
        sql = "SELECT call, kind, facts FROM checkpoints WHERE path = ? AND owner = ?"
        found = self.journal.rows(sql, path, owner)
        if not found or kind not in (None, found[0][1]):
            what = "checkpoint" if kind is None else f"checkpoint for {kind}"
            raise Refused(f"path={path!r}: there is no such {what}")
        return found[0][0], facts(found[0][2])

    def _read(self, path: str, owner: str, kind: str) -> dict[str, Any]:
        self.checkpoint(path, owner, kind)
        return states.read(self.file_of(path))[0]

    def delete(self, path: str, owner: str) -> None:
        """Delete an owner's checkpoint."""
        self.checkpoint(path, owner)
        self.journal.rows("DELETE FROM checkpoints WHERE path = ?", path)
        self.file_of(path).unlink(missing_ok=True)

    def expire(self) -> None:
        """Delete checkpoints whose time has come."""
        sql = "DELETE FROM checkpoints WHERE expires < ? RETURNING path"
        for (path,) in self.journal.rows(sql, time.time()):
            self.file_of(path).unlink(missing_ok=True)

    # ---------------------------------------------------------------- where models are

    def _bring(self, model: Model) -> bool:
        """Bring a model to the devices; return whether there was room."""
        model.used = time.monotonic()
        if model.slot is not None:
            return True
        if None in self._slots:
            slot = self._slots.index(None)
        else:
            busy = {id(one.model) for one in self._running}
            idle = [m for m in self._slots if m is not None and id(m) not in busy]
            if not idle:
                return False
            slot = self._send_away(min(idle, key=lambda m: m.used))
        tenant, model.host = model.host, None
        if tenant is None and model.saved >= 0:
            parts, _ = states.read(self._file(model))
            tenant = Tenant(**parts)
        if tenant is None:
            tenant = self._draw(model)
        self.tenants.put(slot, tenant)
        self._slots[slot], model.slot = model, slot
        return True

    def _send_away(self, model: Model) -> int:
        """Take a model off the devices, into memory, or into its file where that is full."""
        slot = model.slot
        assert slot is not None
        with self._changed:
            in_memory = [m for m in self._models.values() if m.host is not None]
        if len(in_memory) >= self._on_host:
            old = min(in_memory, key=lambda m: m.used)
            assert old.host is not None
            self._save(old, old.next - 1, old.host)
            old.host = None
        model.host = self.tenants.take(slot)
        self._slots[slot], model.slot = None, None
        return slot

    def _draw(self, model: Model) -> Tenant:
        lora = model.facts["lora"]
        seed = lora["seed"]
        if seed is None:
            seed = int.from_bytes(hashlib.sha256(model.id.encode()).digest()[:8]) >> 1
        chosen = trained(self.tenants.lora, lora)
        return new_tenant(self.tenants.lora, seed, lora["rank"], ALPHA, chosen)

    def _file(self, model: Model) -> Path:
        return self.root / "models" / f"{model.id}.safetensors"

    def _save(self, model: Model, number: int, tenant: Tenant | None = None) -> None:
        """Write what a model is after a call; what was asked before is not needed any more."""
        if tenant is None:
            if model.slot is None:
                return
            tenant = self.tenants.take(model.slot)
        states.write(self._file(model), tenant, states.WHOLE, number=number)
        self.journal.forget_bodies(model.id, number)
        model.saved = number

    # ---------------------------------------------------------------- samples

    def _sample(self, calls: Sequence[Call]) -> None:
        """Begin to sample, after the prompts of all calls are scored where that is asked for."""
        asked: list[Asking] = []
        for call in calls:
            self._guarded(call, lambda call: asked.append(self._asking(call)))
        told = self._score([one for one in asked if _of_prompt(one.body)])
        for one in asked:
            given = one.call, one.body, one.name, one.load, told.get(one.call.id, Prompt())
            answered = functools.partial(self._sampled, one.call)
            self._guarded(one.call, lambda _, g=given, a=answered: self.samplers.submit(*g, a))

    def _asking(self, call: Call) -> Asking:
        body = bodies.Sample.model_validate_json(call.body)
        path = self.sampled_path(call.target, call.owner)
        if not path:
            return Asking(call, body, "", None)
        version, _ = self.checkpoint(path, call.owner, "sampler")
        return Asking(call, body, f"{path}@{version}", lambda: states.read(self.file_of(path))[0])

    def _sampled(self, call: Call, answer: bytes | Exception) -> None:
        if isinstance(answer, bytes):
            self._finish(call, DONE, answer)
            return
        self._fail(call, answer)

    def sampled_path(self, sampler: str, owner: str) -> str:
        """Return the checkpoint that an owner's sampler samples from; "" = it is the base.

        Raises:
            Refused: there is no such sampler.
        """
        sql = "SELECT path FROM samplers WHERE id = ? AND owner = ?"
        found = self.journal.rows(sql, sampler, owner)
        if not found:
            raise Refused(f"sampling_session_id={sampler!r}: there is no such sampler")
        return found[0][0]

    def _score(self, asked: Sequence[Asking]) -> dict[str, Prompt]:
        """Return what is told of prompts, by call.

        Each prompt is cut by itself. Those of one model and width are scored together; the
        likeliest ids are found by prompt.
        """
        found = {one.call.id: _untold(one.body) for one in asked}
        slot = self.tenants.slots - 1
        shape = {"slot": slot, "rows": self.tenants.rows, "full": self._full}
        groups: defaultdict[tuple[str, int], list[tuple[Asking, Tile, Place]]] = defaultdict(list)
        for one in asked:
            tokens = np.array(one.body.prompt.tokens, np.int32)
            if not 2 <= len(tokens) <= self.longest or bodies.wrong(tokens, self.vocabulary):
                continue  # nothing to score, or refused when it is to be sampled
            (tile,), (place,) = cut(
                [Datum(tokens[:-1], tokens[1:], {})], "cross_entropy", {}, **shape
            )
            groups[one.name, tile.tokens.shape[1]].append((one, tile, place))
        there, most = None, min(bodies.MOST_ALTERNATIVES, self.vocabulary)
        for (name, _), members in sorted(groups.items(), key=lambda group: group[0]):
            if name != there:
                model, load = new_tenant(self.tenants.lora, 0, 1, 1.0, set()), members[0][0].load
                if load is not None:
                    try:
                        parts = load()
                    # just deleted, or damaged: the engine finds no more, and says so
                    except (OSError, DamagedFile):
                        continue
                    model = model.replace(adapters=parts["adapters"], scale=parts["scale"])
                self.tenants.put(slot, model)
                there = name
            wanted = [one for one in members if one[0].body.prompt_logprobs]
            log_probs, _ = self.tenants.run([tile for _, tile, _ in wanted], learns=False)
            for (one, _, place), scores in zip(wanted, log_probs, strict=True):
                _tell(found[one.call.id].log_probs, one.body, read([place], [scores])[0])
            for one, tile, place in members:
                if k := one.body.topk_prompt_logprobs:
                    best = self.tenants.likeliest(tile, most)
                    told = found[one.call.id]
                    for column, values in zip((told.ids, told.scores), best, strict=True):
                        _tell(column, one.body, read([place], [values[..., :k]])[0])
        return found


def _of_prompt(body: bodies.Sample) -> bool:
    """Return whether something of the prompt is to be told."""
    return body.prompt_logprobs or body.topk_prompt_logprobs > 0


def _untold(body: bodies.Sample) -> Prompt:
    """Return what is told of a prompt of which nothing is known."""
    length, k = len(body.prompt.tokens), body.topk_prompt_logprobs
    log_probs = np.full(length, np.nan, np.float32) if body.prompt_logprobs else None
    if not k:
        return Prompt(log_probs)
    scores = np.full((length, k), NO_LOG_PROB, np.float32)
    return Prompt(log_probs, np.zeros((length, k), np.int32), scores)


def _tell(column: np.ndarray | None, body: bodies.Sample, found: np.ndarray) -> None:
    """Write what was found of a prompt from its second token on [T - 1, ...], where it is wanted.

    Args:
        column: [T, ...] or wider, since a vocabulary may have fewer ids than are asked for.
    """
    assert column is not None
    last = min(body.prompt_logprobs_last_n or len(found), len(found))
    where = (slice(len(column) - last, None), *(slice(n) for n in found.shape[1:]))
    column[where] = found[len(found) - last :]


def trained(lora: LoraConfig, asked: dict[str, Any]) -> set[str]:
    """Return the leaves whose adapters a model trains."""
    chosen = ATTENTION * asked["train_attn"] + MLP * asked["train_mlp"]
    chosen += HEAD * asked["train_unembed"]
    return {name for name in matrices(lora.model) if name.rpartition("/")[2] in chosen}


def _zeros(tree: Any) -> Any:
    return {name: {k: np.zeros_like(x) for k, x in pair.items()} for name, pair in tree.items()}


def _finite(adapters: Any) -> bool:
    return all(np.isfinite(x).all() for pair in adapters.values() for x in pair.values())
