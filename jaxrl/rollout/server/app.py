"""The routes of the server, on aiohttp."""

import asyncio
import contextlib
import functools
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from jaxrl.rollout.protocol import Completion, PromptScores
from jaxrl.rollout.server.auth import Guard
from jaxrl.rollout.server.bodies import (
    AbortBody,
    DetokenizeBody,
    RewardBody,
    TokenizeChatBody,
    TokenizeTextBody,
    UpdateWeightsBody,
    invalid,
    plain_messages,
)
from jaxrl.rollout.server.errors import ApiError, parse_json
from jaxrl.rollout.server.prometheus import Stopwatch
from jaxrl.rollout.server.requests import SampleRequest
from jaxrl.rollout.server.responses import ResponseBuilder, TextStream
from jaxrl.rollout.server.responses_api import ResponseView
from jaxrl.rollout.server.runs import RunningRequest, SamplePart
from jaxrl.rollout.server.service import Control, Service
from jaxrl.rollout.weights.incoming import Notice

_log = logging.getLogger(__name__)
SESSION_HEADER = "X-Session-ID"
CLIENT_SECONDS = 60.0  # that a client may take to send a body, or to read what is left to say
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiRoutes:
    """Hold the handlers of the routes.

    Args:
        service: samples.
        control: of the engine; None = these routes are not there.
        guard: who may ask.
    """

    def __init__(self, service: Service, control: Control | None, guard: Guard) -> None:
        self.service, self.control, self.guard = service, control, guard

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(
            middlewares=[self._answer_errors], client_max_size=self.service.limits.max_body_bytes
        )
        app.add_routes(
            [
                web.post("/v1/chat/completions", self.chat),
                web.post("/v1/completions", self.completions),
                web.post("/v1/responses", self.responses),
                web.get("/v1/models", self.models),
                web.get("/v1/models/{model:.+}", self.model),
                web.post("/tokenize", self.tokenize),
                web.post("/detokenize", self.detokenize),
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
                web.post("/abort", self.abort),
                web.get("/sessions/{id}", self.get_session),
                web.delete("/sessions/{id}", self.take_session),
                web.post("/sessions/{id}/reward", self.reward),
                # for programs that take an address and no headers
                web.post("/sessions/{id}/v1/chat/completions", self.chat),
                web.post("/sessions/{id}/v1/completions", self.completions),
                web.post("/sessions/{id}/v1/responses", self.responses),
                web.get("/sessions/{id}/v1/models", self.models),
                web.get("/sessions/{id}/v1/models/{model:.+}", self.model),
            ]
        )
        if self.control is not None:
            app.add_routes(ControlRoutes(self.control).routes())
        return app

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check who asks, and answer; every error has OpenAI's form.

        No client is waited for without end.
        """
        try:
            self.guard.check(request.headers, _host(request))
            await _read(request)
            response = await handler(request)
        except web.HTTPException as error:  # of the router, and of bodies that are too long
            response = _failed(ApiError(error.status, _router_message(error, request)))
        except ValidationError as error:
            response = _failed(invalid(error))
        except ApiError as error:
            response = _failed(error)
        except ConnectionError:  # the client has left
            raise
        except Exception:
            _log.exception("%s %s", request.method, request.path)
            response = _failed(ApiError(500, "the server failed; its log says why"))
        resource = request.match_info.route.resource
        route = resource.canonical if resource else "unknown"
        self.service.measures.requests.labels(route, response.status).inc()
        await _deliver(request, response)
        return response

    # ---- samples

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /v1/chat/completions."""
        return await self._sample(request, chat=True)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /v1/completions."""
        return await self._sample(request, chat=False)

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /v1/responses: a chat, told otherwise."""
        view = ResponseView(parse_json(await request.read()))
        try:
            return await self._sample(request, chat=True, view=view)
        except ValidationError as error:
            raise view.renamed(invalid(error)) from error
        except ApiError as error:
            raise view.renamed(error) from error

    async def _sample(
        self, request: web.Request, *, chat: bool, view: ResponseView | None = None
    ) -> web.StreamResponse:
        """Sample what a request asks for, and answer it.

        Args:
            view: shows the chat; None = as it is.
        """
        stream: web.StreamResponse | None = None
        seconds, watch = self.service.limits.request_seconds, Stopwatch(self.service.measures)
        try:
            async with asyncio.timeout(seconds):
                text = await request.read()
                body, size = parse_json(text) if view is None else view.chat, len(text)
                name = request.match_info.get("id", request.headers.get(SESSION_HEADER))
                sample_request = await self.service.read(body, name, chat=chat, size=size)
                async with self.service.running(sample_request) as run:
                    if not sample_request.stream:
                        return await self._whole(run, watch, view)
                    stream = await _open_stream(request)
                    if view is None:
                        await self._stream(run, stream, watch)
                    else:
                        await self._stream_view(run, stream, watch, view)
        except TimeoutError:
            error = ApiError(504, f"not finished after {seconds:g} seconds", code="timeout")
        except ApiError as refused:
            error = refused
        else:
            return stream
        finally:
            watch.stop()
        if stream is None:
            raise error
        async with _patience(request):
            # the status has been sent
            await (
                _send(stream, error.body)
                if view is None
                else _send_event(stream, view.error(error))
            )
        return stream

    async def _whole(
        self, run: RunningRequest, watch: Stopwatch, view: ResponseView | None
    ) -> web.Response:
        sample_request, completions = run.request, {}
        scores = await self.service.scores(sample_request)
        async for part in run.parts():
            watch.tokens(len(part.new.tokens))
            if part.whole is not None:
                completions[part.sample] = part.whole
        ordered = [completions[number] for number in range(sample_request.samples)]
        answer = self._answer(sample_request, scores)
        for number, completion in enumerate(ordered):
            await self._record(answer, number, completion)
        if view is not None:
            (completion,) = ordered
            shown = await self.service.in_thread(view.whole, answer, completion)
            return web.json_response(shown)
        if not sample_request.scores_prompts:
            return web.json_response(await self.service.in_thread(answer.whole, ordered))
        text = await self.service.in_thread_of(sample_request, _written, answer, ordered)
        return web.Response(text=text, content_type="application/json")

    async def _stream(
        self, run: RunningRequest, stream: web.StreamResponse, watch: Stopwatch
    ) -> None:
        sample_request, tokens = run.request, 0
        answer = self._answer(sample_request, await self.service.scores(sample_request))
        texts = [SampleStream(answer, n) for n in range(sample_request.samples)]
        for number in range(sample_request.samples if answer.opens else 0):
            opening = await self.service.in_thread_of(sample_request, answer.opening, number)
            await _send(stream, opening)
        async for part in run.parts():
            watch.tokens(len(part.new.tokens))
            tokens += len(part.new.tokens)
            if part.whole is not None:
                await self._record(answer, part.sample, part.whole)
            piece = texts[part.sample].piece(part)
            if piece is not None:
                await _send(stream, piece)
        if sample_request.include_usage:
            await _send(stream, answer.usage_piece(tokens))
        await stream.write(b"data: [DONE]\n\n")
        await stream.write_eof()

    async def _stream_view(
        self, run: RunningRequest, stream: web.StreamResponse, watch: Stopwatch, view: ResponseView
    ) -> None:
        answer = self._answer(run.request, ())
        text = TextStream(answer.tokenizer, run.request)
        for event in view.opening(answer):
            await _send_event(stream, event)
        async for part in run.parts():
            watch.tokens(len(part.new.tokens))
            whole = part.whole
            if whole is not None:
                await self._record(answer, part.sample, whole)
            if answer.in_parts:
                new = "" if whole is None else answer.message(part.sample, whole)["content"]
            else:
                new = text.add(part.new.tokens) if whole is None else text.finish(whole)
            if new:
                await _send_event(stream, view.piece(answer, new))
            for event in () if whole is None else view.ending(answer, whole):
                await _send_event(stream, event)
        await stream.write_eof()

    async def _record(self, answer: ResponseBuilder, number: int, completion: Completion) -> None:
        if answer.request.turn is not None:
            await self.service.in_thread(self._keep, answer, number, completion)

    def _keep(self, answer: ResponseBuilder, number: int, completion: Completion) -> None:
        """Keep a sample in its session, and count it."""
        request, measures = answer.request, self.service.measures
        turn, message = request.turn, None
        assert turn is not None
        if request.chat:
            (message,) = plain_messages([answer.message(number, completion)])
        keys = [key for keys in request.keys for key in keys]
        segment = turn.session.record(turn, completion, message, keys[number])
        if segment is not None:
            branch = "other" if segment.number else "first"
            measures.session_tokens.labels(branch).inc(len(completion.tokens))
            if segment.number and len(segment.points) == 1:
                measures.session_branches.inc()

    def _answer(
        self, sample_request: SampleRequest, scores: Sequence[PromptScores]
    ) -> ResponseBuilder:
        return ResponseBuilder(self.service.served, sample_request, scores)

    async def abort(self, request: web.Request) -> web.Response:
        """Answer POST /abort: {"request_ids": [...]}, or {} for all."""
        body = AbortBody.model_validate(parse_json(await request.read()))
        return web.json_response({"aborted": self.service.abort(body.request_ids)})

    # ---- sessions

    async def get_session(self, request: web.Request) -> web.Response:
        """Answer GET /sessions/ID."""
        session = self.service.sessions.get(request.match_info["id"])
        return web.json_response(await self.service.in_thread(session.as_json))

    async def take_session(self, request: web.Request) -> web.Response:
        """Answer DELETE /sessions/ID: as GET does, and forget the session."""
        session = self.service.sessions.take_of_client(request.match_info["id"])
        return web.json_response(await self.service.in_thread(session.as_json))

    async def reward(self, request: web.Request) -> web.Response:
        """Answer POST /sessions/ID/reward: {"reward": number, "secret": text}."""
        body = RewardBody.model_validate(parse_json(await request.read()))
        name = request.match_info["id"]
        self.service.sessions.reward(name, body.reward, body.secret)
        return web.json_response({"id": name, "reward": body.reward})

    # ---- the model

    async def models(self, request: web.Request) -> web.Response:
        """Answer GET /v1/models."""
        return web.json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: web.Request) -> web.Response:
        """Answer GET /v1/models/NAME."""
        self.service.served.check_name(request.match_info["model"])
        return web.json_response(self._model())

    def _model(self) -> dict[str, Any]:
        served = self.service.served
        return {
            "id": served.name,
            "object": "model",
            "created": 0,
            "owned_by": "jaxrl",
            "max_model_len": served.max_model_len,
        }

    async def tokenize(self, request: web.Request) -> web.Response:
        """Answer POST /tokenize: a prompt or messages to token ids."""
        text, served = await request.read(), self.service.served
        raw = parse_json(text)
        if raw.get("messages") is not None:
            body = TokenizeChatBody.model_validate(raw)
            variables = self.service.reader.variables(body)
            encode = functools.partial(served.encode_chat, body.messages, variables)
        else:
            body = TokenizeTextBody.model_validate(raw)
            encode = functools.partial(served.encode, body.prompt, special=body.add_special_tokens)
        served.check_name(body.model)
        tokens = await self.service.in_thread(encode, size=len(text))
        return web.json_response(
            {"count": len(tokens), "max_model_len": served.max_model_len, "tokens": tokens}
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        """Answer POST /detokenize: token ids to text."""
        body = DetokenizeBody.model_validate(parse_json(await request.read()))
        served = self.service.served
        served.check_name(body.model)
        ids = served.check_ids("tokens", body.tokens)
        text = await self.service.in_thread(served.tokenizer.decode, list(ids))
        return web.json_response({"prompt": text})

    async def health(self, request: web.Request) -> web.Response:
        """Answer GET /health: 503 while the engine has no weights."""
        version = self.service.guests.version
        status = "ok" if version is not None else "no weights"
        body = {"status": status, "version": version}
        return web.json_response(body, status=200 if version is not None else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        """Answer GET /metrics, in the text form of Prometheus."""
        return web.Response(body=self.service.measures.text(), content_type="text/plain")


class ControlRoutes:
    """Hold the handlers of what only the engine's owner may do.

    Args:
        control: does it.
    """

    def __init__(self, control: Control) -> None:
        self.control = control

    def routes(self) -> list[web.RouteDef]:
        """Return the routes with their handlers."""
        return [
            web.post("/pause", self.pause),
            web.post("/resume", self.resume),
            web.get("/is_paused", self.is_paused),
            web.post("/sleep", self.sleep),
            web.post("/wake_up", self.wake_up),
            web.post("/update_weights", self.update_weights),
            web.post("/receive_weights", self.receive_weights),
        ]

    async def pause(self, request: web.Request) -> web.Response:
        """Answer POST /pause?mode=keep, abort or wait."""
        await self.control.pause(request.query.get("mode", "abort"))
        return web.json_response({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        """Answer POST /resume."""
        await self.control.resume()
        return web.json_response({"status": "resumed"})

    async def is_paused(self, request: web.Request) -> web.Response:
        """Answer GET /is_paused."""
        return web.json_response({"is_paused": self.control.paused})

    async def sleep(self, request: web.Request) -> web.Response:
        """Answer POST /sleep."""
        await self.control.sleep()
        return web.json_response({"status": "asleep"})

    async def wake_up(self, request: web.Request) -> web.Response:
        """Answer POST /wake_up."""
        await self.control.wake()
        return web.json_response({"status": "awake"})

    async def update_weights(self, request: web.Request) -> web.Response:
        """Answer POST /update_weights: {"path": folder, "version": number}."""
        body = UpdateWeightsBody.model_validate(parse_json(await request.read()))
        number = await self.control.update_weights(body.path, body.version)
        return web.json_response({"status": "updated", "version": number})

    async def receive_weights(self, request: web.Request) -> web.Response:
        """Answer POST /receive_weights: a group that can be pulled, see `incoming.Notice`."""
        body = parse_json(await request.read())
        try:
            notice = Notice.read(body)
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        last, address = await self.control.receive_weights(notice, request.remote)
        status = {"status": "updated" if last else "received", "version": self.control.version}
        return web.json_response(status | {"address": address})


class SampleStream:
    """Build the pieces of one sample.

    Args:
        answer: builds them.
        number: of the sample.
    """

    def __init__(self, answer: ResponseBuilder, number: int) -> None:
        self.answer, self.number, self.length = answer, number, len(answer.echo(number))
        self.text = TextStream(answer.tokenizer, answer.request)

    def piece(self, part: SamplePart) -> dict[str, Any] | None:
        """Return what a part tells the client; None: nothing yet."""
        whole = part.whole
        if self.answer.in_parts:
            if whole is not None:
                return self.answer.last_piece(self.number, part.new, whole)
            text = ""
        else:
            text = self.text.add(part.new.tokens) if whole is None else self.text.finish(whole)
        sample_request, start = self.answer.request, self.length
        self.length += len(text)
        if not (
            text
            or whole
            or sample_request.return_token_ids
            or sample_request.alternatives is not None
        ):
            return None
        return self.answer.piece(self.number, text, part.new, start)


def _written(answer: ResponseBuilder, completions: Sequence[Completion]) -> str:
    """Return the JSON of a long answer, between whose parts other threads go on."""
    return "".join(json.JSONEncoder().iterencode(answer.whole(completions)))


async def _open_stream(request: web.Request) -> web.StreamResponse:
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    stream = web.StreamResponse(headers=headers)
    await stream.prepare(request)
    return stream


async def _send(stream: web.StreamResponse, body: dict[str, Any]) -> None:
    await stream.write(b"data: " + json.dumps(body).encode() + b"\n\n")


async def _send_event(stream: web.StreamResponse, event: dict[str, Any]) -> None:
    await stream.write(f"event: {event['type']}\n".encode())
    await _send(stream, event)


@contextlib.asynccontextmanager
async def _patience(request: web.Request) -> AsyncIterator[None]:
    """Cut the connection of a client that does not read what is written in the block."""
    try:
        async with asyncio.timeout(CLIENT_SECONDS):
            yield
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"nothing read for {CLIENT_SECONDS:g} seconds") from None


async def _deliver(request: web.Request, response: web.StreamResponse) -> None:
    """Write what is not written yet."""
    async with _patience(request):
        await response.prepare(request)
        await response.write_eof()


async def _read(request: web.Request) -> None:
    """Read the body, which handlers then find read."""
    try:
        async with asyncio.timeout(CLIENT_SECONDS):
            await request.read()
    except TimeoutError:
        message = f"the body had not come after {CLIENT_SECONDS:g} seconds"
        raise ApiError(408, message, code="timeout") from None


def _host(request: web.Request) -> str | None:
    try:
        return request.url.host or ""
    except ValueError:  # a port that is none
        return None


def _failed(error: ApiError) -> web.Response:
    return web.json_response(error.body, status=error.status, headers=error.headers)


def _router_message(error: web.HTTPException, request: web.Request) -> str:
    if error.status == 404:
        return f"there is no {request.method} {request.path}"
    if error.status == 405:
        return f"{request.path} does not take {request.method}"
    return error.text or error.reason
