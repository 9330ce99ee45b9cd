"""The routes of Tinker's API, on aiohttp."""

import asyncio
import json
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ValidationError

from jaxrl.rollout.server.bodies import invalid
from jaxrl.rollout.server.errors import ApiError, parse_json, refuse
from jaxrl.tools.tinker import bodies, graphs
from jaxrl.tools.tinker.journal import DONE, WAITS, Call, Reused, facts
from jaxrl.tools.tinker.keys import Keys
from jaxrl.tools.tinker.service import BINARY, FOLDERS, SCHEME, Refused, Service

_log = logging.getLogger(__name__)
PATIENCE = 20.0  # seconds that a client waits for an answer before it asks again
PROTOBUF = "application/x-protobuf"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OWNER = web.RequestKey("owner", str)


class TinkerRoutes:
    """Hold the handlers of the routes.

    Args:
        service: does what is asked.
        keys: who may ask.
        most_bytes: of a body.
        most_waiting: calls of an owner that are not answered yet.
        most_models: of an owner.
    """

    def __init__(
        self,
        service: Service,
        keys: Keys,
        *,
        most_bytes: int,
        most_waiting: int,
        most_models: int,
    ) -> None:
        self.service, self.journal, self.keys = service, service.journal, keys
        self._most_bytes, self._most_waiting = most_bytes, most_waiting
        self._most_models = most_models
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)  # for an answer
        self._loop: asyncio.AbstractEventLoop | None = None

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(middlewares=[self._answer_errors], client_max_size=self._most_bytes)
        post = {
            "client/config": self.client_config,
            "client/dynamic_config": self.dynamic_config,
            "telemetry": self.telemetry,
            "create_session": self.create_session,
            "session_heartbeat": self.heartbeat,
            "sessions/{session}/finish": self.finish_session,
            "create_custom_loss": self.create_loss,
            "create_model": self.create_model,
            "get_info": self.get_info,
            "forward_backward": self.forward_backward,
            "optim_step": self.optim_step,
            "save_weights": self.save_weights,
            "save_weights_for_sampler": self.save_for_sampler,
            "load_weights": self.load_weights,
            "create_sampling_session": self.create_sampler,
            "join_sampling_session": self.join_sampler,
            "asample": self.sample,
            "retrieve_future": self.retrieve,
            "weights_info": self.weights_info,
        }
        get = {
            "healthz": self.health,
            "get_server_capabilities": self.capabilities,
            "training_runs": self.training_runs,
            "training_runs/{model}": self.training_run,
            "training_runs/{model}/checkpoints": self.checkpoints_of,
            "checkpoints": self.checkpoints,
            "samplers/{sampler}": self.get_sampler,
            "sessions": self.sessions,
            "sessions/{session}": self.get_session,
        }
        checkpoint = "/api/v1/training_runs/{model}/checkpoints/{folder}/{name}"
        app.add_routes(
            [
                *(web.post(f"/api/v1/{path}", handler) for path, handler in post.items()),
                *(web.get(f"/api/v1/{path}", handler) for path, handler in get.items()),
                web.delete(checkpoint, self.delete_checkpoint),
                web.put(f"{checkpoint}/ttl", self.set_ttl),
            ]
        )
        app.on_startup.append(self._start)
        return app

    async def _start(self, app: web.Application) -> None:
        self._loop = asyncio.get_running_loop()
        self.service.start(self._told)

    def _told(self, name: str) -> None:
        assert self._loop is not None

        def wake() -> None:
            for event in self._waiting.get(name, ()):
                event.set()

        self._loop.call_soon_threadsafe(wake)

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check who asks, and answer; every error says what is wrong."""
        try:
            request[OWNER] = self.keys.owner(request.headers, request.url.host)
            return await handler(request)
        except web.HTTPException as error:
            found = ApiError(error.status, error.text or error.reason)
        except ValidationError as error:
            found = invalid(error)
        except Reused as error:
            found = ApiError(400, str(error))
        except Refused as error:
            found = ApiError(404, str(error))
        except ApiError as error:
            found = error
        except ValueError as error:
            found = ApiError(400, str(error))
        except ConnectionError:  # the client has left
            raise
        except Exception:
            _log.exception("%s %s", request.method, request.path)
            found = ApiError(500, "the server failed; its log says why")
        body = {"error": str(found), "detail": str(found), "category": "user"}
        return web.json_response(body, status=found.status, headers=found.headers)

    async def _body(self, request: web.Request, kind: type[BaseModel]) -> Any:
        return kind.model_validate(parse_json(await request.read()))

    # ---- what is there

    async def health(self, request: web.Request) -> web.Response:
        """Answer GET /healthz."""
        return web.json_response({"status": "ok"})

    async def capabilities(self, request: web.Request) -> web.Response:
        """Answer GET /get_server_capabilities."""
        model = {
            "model_name": self.service.base,
            "max_context_length": self.service.longest,
            "trainable": True,
            "sampleable": True,
        }
        return web.json_response({"supported_models": [model]})

    async def client_config(self, request: web.Request) -> web.Response:
        """Answer POST /client/config: how the SDK is to ask."""
        chunk = self._most_bytes // 2  # what the SDK estimates is less than what it sends
        return web.json_response(
            {
                "fwdbwd_max_chunk_bytes_count": chunk,
                "custom_loss_server_side": True,
                "use_pyqwest_transport": False,
            }
        )

    async def dynamic_config(self, request: web.Request) -> web.Response:
        """Answer POST /client/dynamic_config."""
        return web.json_response({})

    async def telemetry(self, request: web.Request) -> web.Response:
        """Answer POST /telemetry: nothing is kept."""
        return web.json_response({"status": "accepted"})

    # ---- sessions

    async def create_session(self, request: web.Request) -> web.Response:
        """Answer POST /create_session."""
        body = await self._body(request, bodies.CreateSession)
        name, now = uuid.uuid4().hex, time.time()
        about = body.model_dump_json()
        sql = "INSERT INTO sessions VALUES (?, ?, ?, ?, NULL, ?)"
        await self._rows(sql, name, request[OWNER], now, now, about)
        return web.json_response({"type": "create_session", "session_id": name})

    async def _session(self, request: web.Request, name: str) -> None:
        """Refuse a session that is not the owner's, or is over."""
        sql = "SELECT ended FROM sessions WHERE id = ? AND owner = ?"
        found = await self._rows(sql, name, request[OWNER])
        if not found:
            raise ApiError(404, f"session_id={name!r}: there is no such session")
        if found[0][0] is not None:
            raise ApiError(410, f"session_id={name!r}: the session is over")

    async def heartbeat(self, request: web.Request) -> web.Response:
        """Answer POST /session_heartbeat."""
        body = await self._body(request, bodies.OfSession)
        await self._session(request, body.session_id)
        await self._rows("UPDATE sessions SET seen = ? WHERE id = ?", time.time(), body.session_id)
        return web.json_response({"type": "session_heartbeat"})

    async def finish_session(self, request: web.Request) -> web.Response:
        """Answer POST /sessions/ID/finish: its models are forgotten, not their checkpoints."""
        name = request.match_info["session"]
        await self._session(request, name)
        await asyncio.to_thread(self.service.end, name)
        return web.json_response({})

    async def sessions(self, request: web.Request) -> web.Response:
        """Answer GET /sessions."""
        sql = "SELECT id FROM sessions WHERE owner = ? ORDER BY opened DESC"
        found = await self._rows(sql, request[OWNER])
        return web.json_response({"sessions": [name for (name,) in found]})

    async def get_session(self, request: web.Request) -> web.Response:
        """Answer GET /sessions/ID."""
        name, owner = request.match_info["session"], request[OWNER]
        sql = "SELECT facts FROM sessions WHERE id = ? AND owner = ?"
        found = await self._rows(sql, name, owner)
        if not found:
            raise ApiError(404, f"session {name!r}: there is none")
        models = await self._rows("SELECT id FROM models WHERE session = ?", name)
        samplers = await self._rows("SELECT id FROM samplers WHERE session = ?", name)
        about = facts(found[0][0])
        return web.json_response(
            {
                "training_run_ids": [model for (model,) in models],
                "sampler_ids": [sampler for (sampler,) in samplers],
                "user_metadata": about["user_metadata"] or None,
                "display_name": about["display_name"] or None,
            }
        )

    # ---- calls

    async def _accept(
        self,
        request: web.Request,
        kind: str,
        target: str,
        number: int,
        raw: bytes,
        about: dict[str, Any] | None = None,
    ) -> web.Response:
        """Write a call to the journal, and answer with the name of its result."""
        owner = request[OWNER]
        sql = "SELECT COUNT(*) FROM calls WHERE owner = ? AND state = 0"
        ((waiting,),) = await self._rows(sql, owner)
        if waiting >= self._most_waiting:
            message = f"{waiting} calls of this key wait, the most; come again"
            raise ApiError(429, message, retry_after=1)
        call = Call(f"{target}:{number}", owner, target, number, kind, raw)
        await asyncio.to_thread(self.service.accept, call, about)
        answer: dict[str, Any] = {"request_id": call.id}
        if kind == "sample":
            count = bodies.Sample.model_validate_json(raw).num_samples
            answer["sample_sequence_ids"] = [f"{call.id}:{n}" for n in range(count)]
        else:
            answer["model_id"] = target
        return web.json_response(answer)

    async def create_loss(self, request: web.Request) -> web.Response:
        """Answer POST /create_custom_loss: it is checked at once."""
        body, raw = await self._body(request, graphs.CreateLoss), await request.read()
        await self._session(request, body.session_id)
        graphs.loss_of(body)
        name, number = f"{body.session_id}:loss:{body.custom_loss_seq_id}", body.custom_loss_seq_id
        call = Call(name, request[OWNER], body.session_id, number, "create_custom_loss", raw)
        await asyncio.to_thread(self.journal.accept, call)
        answer = json.dumps({"type": "create_custom_loss", "loss_id": name}).encode()
        await asyncio.to_thread(self.journal.finish, name, DONE, answer)
        return web.json_response({"request_id": name})

    async def create_model(self, request: web.Request) -> web.Response:
        """Answer POST /create_model."""
        body = await self._body(request, bodies.CreateModel)
        await self._session(request, body.session_id)
        self._check_base(body.base_model)
        lora, most = body.lora_config, self.service.tenants.lora.rank
        if lora is None:
            refuse("lora_config", None, "this server trains adapters: give a rank")
        if lora.rank > most:
            refuse("lora_config.rank", lora.rank, f"must be at most {most} here (tinker.max_rank)")
        about = {"lora": lora.model_dump(), "metadata": body.user_metadata}
        target = f"{body.session_id}:train:{body.model_seq_id}"
        await self._check_models(request[OWNER], target)
        return await self._accept(request, "create_model", target, 0, await request.read(), about)

    def _check_base(self, name: str) -> None:
        if name != self.service.base:
            refuse("base_model", name, f"this server has {self.service.base!r}")

    async def _check_models(self, owner: str, target: str) -> None:
        sql = "SELECT COUNT(*) FROM models WHERE owner = ? AND ended IS NULL AND id != ?"
        ((number,),) = await self._rows(sql, owner, target)
        if number >= self._most_models:
            raise ApiError(
                403, f"{number} models of this key are there, the most; finish a session of them"
            )

    async def get_info(self, request: web.Request) -> web.Response:
        """Answer POST /get_info."""
        body = await self._body(request, bodies.OfModel)
        model = self.service.model(body.model_id, request[OWNER])
        data = {"model_name": self.service.base, "tokenizer_id": self.service.folder}
        return web.json_response(
            {
                "type": "get_info",
                "model_id": model.id,
                "model_data": data,
                "is_lora": True,
                "lora_rank": model.facts["lora"]["rank"],
                "model_name": self.service.base,
            }
        )

    async def forward_backward(self, request: web.Request) -> web.Response:
        """Answer POST /forward_backward, whose body is protobuf."""
        if request.content_type != PROTOBUF:
            refuse("Content-Type", request.content_type, f"must be {PROTOBUF}")
        raw = await request.read()
        message = await asyncio.to_thread(bodies.parse_forward_backward, raw)
        self.service.model(message.model_id, request[OWNER])
        if message.seq_id < 1:
            refuse("seq_id", message.seq_id, "must be 1 or more")
        kind = "forward" if message.forward_only else "forward_backward"
        return await self._accept(request, kind, message.model_id, message.seq_id, raw)

    async def _of_model(
        self, request: web.Request, kind: str, body_kind: type[BaseModel]
    ) -> web.Response:
        body = await self._body(request, body_kind)
        self.service.model(body.model_id, request[OWNER])
        raw = await request.read()
        return await self._accept(request, kind, body.model_id, body.seq_id, raw)

    async def optim_step(self, request: web.Request) -> web.Response:
        """Answer POST /optim_step."""
        return await self._of_model(request, "optim_step", bodies.OptimStep)

    async def save_weights(self, request: web.Request) -> web.Response:
        """Answer POST /save_weights."""
        return await self._of_model(request, "save_weights", bodies.SaveWeights)

    async def save_for_sampler(self, request: web.Request) -> web.Response:
        """Answer POST /save_weights_for_sampler."""
        return await self._of_model(request, "save_weights_for_sampler", bodies.SaveForSampler)

    async def load_weights(self, request: web.Request) -> web.Response:
        """Answer POST /load_weights: into a model, or into one that it creates."""
        body, raw = await self._body(request, bodies.LoadWeights), await request.read()
        owner = request[OWNER]
        if body.session_id is None:
            if body.model_id is None or body.seq_id is None:
                refuse("model_id", body.model_id, "give model_id and seq_id, or a session's")
            self.service.model(body.model_id, owner)
            return await self._accept(request, "load_weights", body.model_id, body.seq_id, raw)
        await self._session(request, body.session_id)
        if body.base_model is not None:
            self._check_base(body.base_model)
        _, known = await asyncio.to_thread(self.service.checkpoint, body.path, owner, "training")
        about = {"lora": known["model"]["lora"], "metadata": body.user_metadata}
        target = f"{body.session_id}:train:{body.model_seq_id or 0}"
        await self._check_models(owner, target)
        return await self._accept(request, "load_weights", target, 0, raw, about)

    # ---- samplers

    async def create_sampler(self, request: web.Request) -> web.Response:
        """Answer POST /create_sampling_session."""
        body = await self._body(request, bodies.OpenSampler)
        await self._session(request, body.session_id)
        if body.base_model is not None:
            self._check_base(body.base_model)
        path = body.model_path or ""
        if path:
            await asyncio.to_thread(self.service.checkpoint, path, request[OWNER], "sampler")
        elif body.base_model is None:
            refuse("model_path", None, "give it, or base_model")
        name = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        given = name, request[OWNER], body.session_id, path
        await asyncio.to_thread(self.service.open_sampler, *given)
        answer = {"type": "create_sampling_session", "sampling_session_id": name}
        return web.json_response(answer)

    async def get_sampler(self, request: web.Request) -> web.Response:
        """Answer GET /samplers/ID."""
        name = request.match_info["sampler"]
        path = await asyncio.to_thread(self.service.sampled_path, name, request[OWNER])
        answer = {"sampler_id": name, "base_model": self.service.base, "model_path": path or None}
        return web.json_response(answer)

    async def join_sampler(self, request: web.Request) -> web.Response:
        """Answer POST /join_sampling_session: a number for a copy of a client."""
        body = await self._body(request, bodies.OfSampler)
        sql = """UPDATE samplers SET clients = clients + 1 WHERE id = ? AND owner = ?
            RETURNING clients"""
        found = await self._rows(sql, body.sampling_session_id, request[OWNER])
        if not found:
            raise ApiError(404, f"sampling_session_id={body.sampling_session_id!r}: there is none")
        answer = {"type": "join_sampling_session", "client_counter": found[0][0]}
        return web.json_response(answer)

    async def sample(self, request: web.Request) -> web.Response:
        """Answer POST /asample."""
        body, raw = await self._body(request, bodies.Sample), await request.read()
        if body.sampling_session_id is None or body.seq_id is None:
            refuse("sampling_session_id", body.sampling_session_id, "is required, with seq_id")
        await asyncio.to_thread(self.service.sampled_path, body.sampling_session_id, request[OWNER])
        target = body.sampling_session_id
        return await self._accept(request, "sample", target, body.seq_id, raw)

    # ---- results

    async def retrieve(self, request: web.Request) -> web.Response:
        """Answer POST /retrieve_future, when there is a result, or 408: ask again."""
        body = await self._body(request, bodies.Retrieve)
        name, event = body.request_id, asyncio.Event()
        self._waiting[name].add(event)  # before it is looked for: it may come in between
        try:
            async with asyncio.timeout(PATIENCE):
                while (found := await self._answer(name, request[OWNER])) and found[1] == WAITS:
                    await event.wait()
                    event.clear()
        except TimeoutError:
            return web.json_response(self._again(name), status=408)
        finally:
            self._waiting[name].discard(event)
            if not self._waiting[name]:
                del self._waiting[name]
        if found is None:
            gone = "there is no such call, or its answer is not kept any more"
            raise ApiError(404, f"request_id={name!r}: {gone}")
        kind, state, answer = found
        if answer is None:
            raise ApiError(410, f"request_id={name!r}: its answer is not kept any more")
        binary = kind in BINARY and state == DONE
        content = PROTOBUF if binary else "application/json"
        return web.Response(body=answer, content_type=content)

    async def _answer(self, name: str, owner: str) -> tuple[str, int, bytes | None] | None:
        return await asyncio.to_thread(self.journal.answer, name, owner)

    def _again(self, name: str) -> dict[str, str]:
        """Say that a call is not done yet, and why, where it waits for another one."""
        state = {"type": "try_again", "request_id": name, "queue_state": "active"}
        missing = self.service.missing(name.rpartition(":")[0])
        if missing is None:
            return state
        reason = f"call {missing} of the model has not come, and calls are done in their order"
        return state | {"queue_state": "paused_capacity", "queue_state_reason": reason}

    # ---- checkpoints

    async def training_runs(self, request: web.Request) -> web.Response:
        """Answer GET /training_runs?offset=&limit=."""
        offset, limit = _page(request)
        owner = request[OWNER]
        sql = "SELECT id FROM models WHERE owner = ? ORDER BY opened DESC LIMIT ? OFFSET ?"
        found = await self._rows(sql, owner, limit, offset)
        ((total,),) = await self._rows("SELECT COUNT(*) FROM models WHERE owner = ?", owner)
        runs = [await self._run(owner, name) for (name,) in found]
        cursor = {"offset": offset, "limit": limit, "total_count": total}
        return web.json_response({"training_runs": runs, "cursor": cursor})

    async def training_run(self, request: web.Request) -> web.Response:
        """Answer GET /training_runs/ID."""
        return web.json_response(await self._run(request[OWNER], request.match_info["model"]))

    async def _run(self, owner: str, name: str) -> dict[str, Any]:
        sql = "SELECT opened, facts FROM models WHERE id = ? AND owner = ?"
        found = await self._rows(sql, name, owner)
        if not found:
            raise ApiError(404, f"training run {name!r}: there is none")
        ((last,),) = await self._rows("SELECT MAX(at) FROM calls WHERE target = ?", name)
        newest: dict[str, Any] = {}
        for checkpoint in await self._checkpoints(owner, name):
            newest.setdefault(checkpoint["checkpoint_type"], checkpoint)
        about = facts(found[0][1])
        return {
            "training_run_id": name,
            "base_model": self.service.base,
            "model_owner": owner,
            "is_lora": True,
            "lora_rank": about["lora"]["rank"],
            "last_request_time": _iso(last or found[0][0]),
            "last_checkpoint": newest.get("training"),
            "last_sampler_checkpoint": newest.get("sampler"),
            "user_metadata": about["metadata"] or None,
        }

    async def _checkpoints(self, owner: str, model: str | None = None) -> list[dict[str, Any]]:
        """Return what an owner has saved, the newest first."""
        await asyncio.to_thread(self.service.expire)
        sql = "SELECT path, kind, bytes, at, expires, facts FROM checkpoints WHERE owner = ?"
        sql, values = (sql, ()) if model is None else (f"{sql} AND model = ?", (model,))
        found = await self._rows(f"{sql} ORDER BY at DESC", owner, *values)
        return [
            {
                "checkpoint_id": "/".join(path.removeprefix(SCHEME).split("/")[1:]),
                "checkpoint_type": kind,
                "time": _iso(at),
                "tinker_path": path,
                "size_bytes": size,
                "public": False,
                "user_metadata": facts(about)["metadata"] or None,
                "expires_at": None if expires is None else _iso(expires),
            }
            for path, kind, size, at, expires, about in found
        ]

    async def checkpoints_of(self, request: web.Request) -> web.Response:
        """Answer GET /training_runs/ID/checkpoints."""
        found = await self._checkpoints(request[OWNER], request.match_info["model"])
        return web.json_response({"checkpoints": found})

    async def checkpoints(self, request: web.Request) -> web.Response:
        """Answer GET /checkpoints?offset=&limit=."""
        offset, limit = _page(request)
        found = await self._checkpoints(request[OWNER])
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        some = found[offset : offset + limit]
        return web.json_response({"checkpoints": some, "cursor": cursor})

    def _path(self, request: web.Request) -> str:
        parts = request.match_info
        if parts["folder"] not in FOLDERS.values():
            raise ApiError(404, f"{parts['folder']!r}: choose {', '.join(FOLDERS.values())}")
        return f"{SCHEME}{parts['model']}/{parts['folder']}/{parts['name']}"

    async def delete_checkpoint(self, request: web.Request) -> web.Response:
        """Answer DELETE /training_runs/ID/checkpoints/FOLDER/NAME."""
        await asyncio.to_thread(self.service.delete, self._path(request), request[OWNER])
        return web.Response(status=204)

    async def set_ttl(self, request: web.Request) -> web.Response:
        """Answer PUT /training_runs/ID/checkpoints/FOLDER/NAME/ttl: null = it stays."""
        path, seconds = self._path(request), parse_json(await request.read()).get("ttl_seconds")
        if seconds is not None and not (isinstance(seconds, int) and seconds > 0):
            refuse("ttl_seconds", seconds, "must be a number of seconds, or null")
        await asyncio.to_thread(self.service.checkpoint, path, request[OWNER])
        expires = None if seconds is None else time.time() + seconds
        await self._rows("UPDATE checkpoints SET expires = ? WHERE path = ?", expires, path)
        return web.json_response({})

    async def weights_info(self, request: web.Request) -> web.Response:
        """Answer POST /weights_info: what is needed to go on from a checkpoint."""
        path = parse_json(await request.read()).get("tinker_path")
        if not isinstance(path, str):
            refuse("tinker_path", path, "must be a path of a checkpoint")
        given = path, request[OWNER]
        _, about = await asyncio.to_thread(self.service.checkpoint, *given)
        lora = {k: x for k, x in about["model"]["lora"].items() if k != "seed"}
        lora["lora_rank"] = lora.pop("rank")
        return web.json_response({"base_model": self.service.base, "is_lora": True, **lora})

    async def _rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return await asyncio.to_thread(self.journal.rows, sql, *values)


def _page(request: web.Request) -> tuple[int, int]:
    try:
        offset, limit = (int(request.query.get(k, d)) for k, d in (("offset", 0), ("limit", 20)))
    except ValueError:
        raise ApiError(400, "offset and limit must be whole numbers") from None
    if offset < 0 or not 1 <= limit <= 1000:
        raise ApiError(400, "offset must be 0 or more, and limit from 1 to 1000")
    return offset, limit


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
