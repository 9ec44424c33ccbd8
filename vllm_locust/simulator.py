"""A server that looks like vLLM on the wire and whose timing is known.

It promises: an answer follows from the seed and the number of the request alone (streams and whole answers
are numbered apart, each from 0; refused requests are not). Its instants are planned ahead, from when the
request got its seat: a late wake-up does not shift the rest, and nothing leaves early (late: up to 1 ms, by
epoll's clock). One token is one event, one HTTP chunk, one send.

The plan: read the request (`_ask`), wait for a seat (`_Seats`), draw the tokens (`_draw`), send each when due
(`_Frames`), count it for `/metrics` (`_Metrics`).

It deliberately has no tokenizer: a prompt costs a token per 4 bytes of UTF-8, begun ones included, and a chat
4 more per message. It takes one prompt per request; sampling parameters, `echo`, `logprobs`, `stop` and tools
are accepted and ignored. A client that left is noticed at the next write. The server lives in the gevent hub
of the thread that starts it: to block that thread without gevent is to stop the server.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from random import Random
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

import gevent
import msgspec
import prometheus_client as prom
from gevent.event import Event
from gevent.pool import Pool
from gevent.pywsgi import WSGIServer
from gevent.socket import IPPROTO_TCP, TCP_NODELAY
from msgspec.json import encode
from prometheus_client.metrics import MetricWrapperBase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Self
    from wsgiref.types import StartResponse, WSGIEnvironment

Json: TypeAlias = dict[str, Any]
Metric = TypeVar("Metric", bound=MetricWrapperBase)
Fault: TypeAlias = Literal["error", "early end"]

VERSION = "0.32.0"  # the vLLM whose wire format this is
BREAK_AFTER = 3  # token events before a faulty stream breaks: a first token and two gaps
MESSAGE_TOKENS = 4  # what a chat template typically puts around a message
LENGTH_MEDIAN, LENGTH_SIGMA = 120, 0.6  # a paragraph; one answer in a hundred is four times as long

_FINGERPRINT = {"system_fingerprint": f"vllm-{VERSION}-simulated"}
_DONE = b"data: [DONE]\n\n"
_ERROR = (  # vLLM encodes this one with spaces, unlike its others
    b'data: {"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the root '
    b'cause.", "type": "InternalServerError", "param": null, "code": 500}}\n\n'
)
_HOLE = "\0"  # where the text goes in a prebuilt event
_TEXT = (  # with a quote, a letter beyond ASCII and a backslash, which clients must unescape
    'the of and to in is that it was for on as with be at by this had not are but from or have an they "yes" '
    "café a\\b one you were all her she there would their we him been has when who will no more if out so"
)
_WORDS = [f" {word}" for word in _TEXT.split()]
_ESCAPED = {text: encode(text) for text in ["", *_WORDS]}

# What vLLM sends as null in an answer that is not streamed.
_NULLS = dict.fromkeys(("service_tier", "kv_transfer_params", "ec_transfer_params", "metrics"))
_CHAT_NULLS = dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "prompt_text"))
_CHOICE_NULLS = dict.fromkeys(("logprobs", "stop_reason", "token_ids", "routed_experts"))
_TEXT_CHOICE_NULLS = dict.fromkeys(("prompt_logprobs", "prompt_token_ids"))
_MESSAGE_NULLS = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
_USAGE_NULLS = dict.fromkeys(("prompt_tokens_details", "completion_tokens_details"))

# vLLM's own buckets, so that what reads its dashboards reads these.
_SECONDS = (0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_MINUTES = (60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, *_SECONDS, 160.0, 640.0, 2560.0)
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, *_SECONDS)
_E2E = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, *_MINUTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What the simulated server is; times in seconds."""

    model: str = "simulated"  # the one model it serves
    seed: int = 0  # same seed, same answers
    ttft_s: float = 0.080  # median time to first token of a request that has a seat, without prefill
    ttft_sigma: float = 0.25  # sigma of its log-normal; 0 = constant
    itl_s: float = 0.012  # median gap between the tokens of a choice
    itl_sigma: float = 0.15  # sigma of its log-normal; 0 = constant
    prefill_s_per_token: float = 0.00004  # added to the time to first token, per prompt token
    seats: int = 64  # requests that run at once; the others queue, first come first served
    max_model_len: int = 32768  # tokens of a prompt and of one answer to it together
    api_key: str | None = None  # with it, /v1/* answers 401 to whoever does not send it
    stream_errors: float = 0.0  # share of streams that send an error object after 3 token events
    early_ends: float = 0.0  # share of streams that just end after 3 token events
    emission: bool = False  # token events carry "emitted_ns": monotonic ns, read right before the write
    completions: bool = True  # False: a chat-only server, /v1/completions is 404

    def __post_init__(self) -> None:
        """Refuse what no server could be."""
        least = {"ttft_s": 0, "ttft_sigma": 0, "itl_s": 0, "itl_sigma": 0, "prefill_s_per_token": 0}
        least |= {"stream_errors": 0, "early_ends": 0, "seats": 1, "max_model_len": 2}
        for name, low in least.items():
            if not low <= getattr(self, name) < math.inf:
                msg = f"{name}={getattr(self, name)}: expected a finite number, at least {low}"
                raise ValueError(msg)
        if self.stream_errors + self.early_ends > 1:
            msg = f"stream_errors={self.stream_errors} + early_ends={self.early_ends}: expected at most 1"
            raise ValueError(msg)


class Simulator:
    """A running server: between `start` and `stop`, or inside `with`."""

    def __init__(self, profile: Profile = Profile(), *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.url = _url(host, port)  # names the real port from `start` on
        self._profile = profile
        self._address = (host, port)
        self._server: Any = None
        self._seats = _Seats(profile.seats)
        self._metrics = _Metrics(profile, self._seats)
        self._streams, self._wholes = itertools.count(), itertools.count()
        self._routes: dict[str, tuple[str, Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]]]] = {
            "/v1/completions": ("POST", partial(self._generate, chat=False)),
            "/v1/chat/completions": ("POST", partial(self._generate, chat=True)),
            "/v1/models": ("GET", lambda _, respond: _reply(respond, 200, _models(profile))),
            "/version": ("GET", lambda _, respond: _reply(respond, 200, {"version": VERSION})),
            "/health": ("GET", lambda _, respond: _reply(respond, 200, b"")),
            "/ping": ("GET", lambda _, respond: _reply(respond, 200, b"")),
            "/metrics": ("GET", self._scrape),
        }
        if not profile.completions:
            del self._routes["/v1/completions"]

    def start(self) -> None:
        """Bind and serve in the background; nothing if it runs already."""
        if self._server is not None:
            return
        self._server = WSGIServer(
            self._address,
            self._application,
            backlog=2048,  # a load test may open all its connections at once
            spawn=Pool(),  # without a pool, `stop` would leave open connections running
            log=None,
            error_log=None,
            environ={"SERVER_NAME": self._address[0]},  # spares gevent a reverse DNS query
        )
        self._server.init_socket()
        # Accepted sockets inherit it. Without it, the second segment of an answer waits for a delayed ACK.
        self._server.socket.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
        self._server.start()
        self.url = _url(self._address[0], self._server.server_port)

    def stop(self) -> None:
        """Close the port and cut what runs; nothing if it does not run."""
        server, self._server = self._server, None
        if server is not None:
            server.stop(timeout=0)

    def serve_forever(self) -> None:
        """Serve until interrupted, or until another greenlet calls `stop`."""
        with self:
            self._server.serve_forever(stop_timeout=0)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _application(self, environ: WSGIEnvironment, respond: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path.startswith("/v1") and not self._allows(environ.get("HTTP_AUTHORIZATION")):
            return _reply(respond, 401, {"error": "Unauthorized"})
        if path not in self._routes:
            return _reply(respond, 404, {"detail": "Not Found"})
        method, handler = self._routes[path]
        if environ["REQUEST_METHOD"] != method:
            return _reply(respond, 405, {"detail": "Method Not Allowed"}, Allow=method)
        try:
            return handler(environ, respond)
        except _RefusedError as refused:
            return _reply(respond, refused.status, refused.body)

    def _allows(self, authorization: str | None) -> bool:
        return self._profile.api_key is None or authorization == f"Bearer {self._profile.api_key}"

    def _scrape(self, _: WSGIEnvironment, respond: StartResponse) -> list[bytes]:
        return _reply(respond, 200, self._metrics.exposition(), **{"Content-Type": prom.CONTENT_TYPE_LATEST})

    def _generate(self, environ: WSGIEnvironment, respond: StartResponse, *, chat: bool) -> Iterator[bytes]:
        ask = _ask(self._profile, environ["wsgi.input"].read(), chat=chat)
        if ask.body.stream:
            return self._stream(ask, next(self._streams), respond)
        return self._whole(ask, next(self._wholes), respond)

    def _stream(self, ask: _Ask, number: int, respond: StartResponse) -> Iterator[bytes]:
        arrived, outcome, written = time.monotonic_ns(), "abort", 0
        fault, frames = _fault(self._profile, number), _Frames(self._profile, ask)
        tokens = _draw(self._profile, ask, number)
        try:
            # vLLM sends the headers before the request has a seat; an empty write makes pywsgi do so.
            respond("200 OK", [("Content-Type", "text/event-stream; charset=utf-8")])(b"")
            with self._seats.taken():
                for token in self._paced(ask, _broken(tokens) if fault else tokens, arrived):
                    if ask.chat and not written:
                        yield from map(frames.role, range(ask.body.n))
                    yield frames.token(token)
                    written += 1
                yield from frames.ending(written, fault)
            outcome = token.finish or "error"
        finally:
            self._metrics.ended(outcome, arrived)

    def _whole(self, ask: _Ask, number: int, respond: StartResponse) -> Iterator[bytes]:
        arrived, outcome = time.monotonic_ns(), "abort"
        try:
            with self._seats.taken():
                tokens = list(self._paced(ask, _draw(self._profile, ask, number), arrived))
                yield from _reply(respond, 200, _answer(self._profile, ask, tokens))
            outcome = tokens[-1].finish or "error"
        finally:
            self._metrics.ended(outcome, arrived)

    def _paced(self, ask: _Ask, tokens: Iterable[_Token], arrived: int) -> Iterator[_Token]:
        """Hand out each token when it is due; count it when its taker, having written it, wants the next."""
        seated = time.monotonic_ns()
        previous: dict[int, int] = {}
        for token in tokens:
            _sleep_until(seated + token.due_ns)
            now = time.monotonic_ns()
            yield token
            if not previous:
                self._metrics.prompt_tokens.inc(ask.prompt)
                self._metrics.ttft.observe((now - arrived) / 1e9)
            elif token.choice in previous:
                self._metrics.itl.observe((now - previous[token.choice]) / 1e9)
            self._metrics.generation_tokens.inc()
            previous[token.choice] = now


class _Seats:
    """So many requests at once; the others queue."""

    def __init__(self, total: int) -> None:
        self.running = 0
        self.queue: deque[Event] = deque()
        self._total = total

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for a seat, hold it inside `with`."""
        turn = Event()
        if self.running < self._total:
            self.running += 1
            turn.set()
        else:
            self.queue.append(turn)
        try:
            turn.wait()
            yield
        finally:
            if not turn.is_set():
                self.queue.remove(turn)
            elif self.queue:
                self.queue.popleft().set()  # the seat changes hands: no newcomer gets in between
            else:
                self.running -= 1


class _Metrics:
    """The part of vLLM's `/metrics` that a client can check itself against."""

    def __init__(self, profile: Profile, seats: _Seats) -> None:
        self._registry = prom.CollectorRegistry()
        labels = {"model_name": profile.model, "engine": "0"}

        def add(kind: Callable[..., Metric], name: str, text: str, **more: tuple[float, ...]) -> Metric:
            family = kind(f"vllm:{name}", text, list(labels), registry=self._registry, **more)
            return family.labels(**labels)

        add(prom.Gauge, "num_requests_running", "With a seat.").set_function(lambda: seats.running)
        add(prom.Gauge, "num_requests_waiting", "For a seat.").set_function(lambda: len(seats.queue))
        cache = add(prom.Gauge, "kv_cache_usage_perc", "Share of the seats that are taken.")
        cache.set_function(lambda: seats.running / profile.seats)
        self.prompt_tokens = add(prom.Counter, "prompt_tokens", "Of answers that have begun.")
        self.generation_tokens = add(prom.Counter, "generation_tokens", "Of all answers, as written.")
        self.ttft = add(prom.Histogram, "time_to_first_token_seconds", "From arrival.", buckets=_TTFT)
        self.itl = add(prom.Histogram, "inter_token_latency_seconds", "Gaps of a choice.", buckets=_ITL)
        self._e2e = add(prom.Histogram, "e2e_request_latency_seconds", "Complete answers.", buckets=_E2E)
        names = ["finished_reason", *labels]
        success = prom.Counter("vllm:request_success", "All that ended.", names, registry=self._registry)
        reasons = ("stop", "length", "abort", "error", "repetition")
        self._success = {reason: success.labels(reason, *labels.values()) for reason in reasons}

    def ended(self, reason: str, arrived: int) -> None:
        """Count a request that is over."""
        self._success[reason].inc()
        if reason in ("stop", "length"):
            self._e2e.observe((time.monotonic_ns() - arrived) / 1e9)

    def exposition(self) -> bytes:
        """Return the text of `/metrics`."""
        return prom.generate_latest(self._registry)


class _Token(NamedTuple):
    """One token event of an answer."""

    due_ns: int  # since the request got its seat
    choice: int
    ordinal: int  # in its choice, from 1
    text: str
    finish: str | None


def _draw(profile: Profile, ask: _Ask, number: int) -> Iterator[_Token]:
    """Draw the answer to request `number`; its choices advance together, as in a batch."""
    rng = Random(f"{profile.seed}/{number}")  # noqa: S311 - no secret
    at_s = _lognormal(rng, profile.ttft_s, profile.ttft_sigma) + profile.prefill_s_per_token * ask.prompt
    ends = [_end(ask, rng) for _ in range(ask.body.n)]
    for ordinal in range(1, max(ends)[0] + 1):
        for choice, (length, reason) in enumerate(ends):
            if ordinal <= length:
                finish = reason if ordinal == length else None
                # vLLM counts the token that ends a sequence, and sends its event with an empty text.
                text = "" if finish == "stop" else rng.choice(_WORDS)
                yield _Token(int(at_s * 1e9), choice, ordinal, text, finish)
        at_s += _lognormal(rng, profile.itl_s, profile.itl_sigma)


def _end(ask: _Ask, rng: Random) -> tuple[int, str]:
    length = max(1, ask.body.min_tokens, round(_lognormal(rng, LENGTH_MEDIAN, LENGTH_SIGMA)))
    return (ask.limit, "length") if ask.body.ignore_eos or length >= ask.limit else (length, "stop")


def _lognormal(rng: Random, median: float, sigma: float) -> float:
    return median * math.exp(sigma * rng.gauss(0.0, 1.0))


def _fault(profile: Profile, number: int) -> Fault | None:
    """Pick by the base-2 radical inverse of the number: exact shares, spread evenly."""
    share = int(f"{number:b}"[::-1], 2) / (1 << number.bit_length())
    if share < profile.stream_errors:
        return "error"
    return "early end" if share < profile.stream_errors + profile.early_ends else None


def _broken(tokens: Iterable[_Token]) -> Iterator[_Token]:
    return (token._replace(finish=None) for token in itertools.islice(tokens, BREAK_AFTER))


def _sleep_until(due_ns: int) -> None:
    gevent.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)  # even when late: others want to run
    while (left := due_ns - time.monotonic_ns()) > 0:  # libev counts from its own, older idea of now
        gevent.sleep(left / 1e9)


class _Frames:
    """The events of one stream; what does not change from token to token is encoded once."""

    def __init__(self, profile: Profile, ask: _Ask) -> None:
        self._ask = ask
        self._emission = profile.emission
        self._identity = _identity(profile, ask, "chat.completion.chunk" if ask.chat else "text_completion")
        plain = (self._event([_piece(ask, choice, _HOLE, None)]) for choice in range(ask.body.n))
        self._plain = [event.split(encode(_HOLE)) for event in plain]

    def role(self, choice: int) -> bytes:
        """Open a choice of a chat."""
        delta = {"role": "assistant", "content": ""}
        piece = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
        usage = {"usage": self._usage_so_far(0)} if self._ask.continuous else {}
        return self._event([piece], **usage, prompt_token_ids=None, prompt_text=None) + b"}\n\n"

    def token(self, token: _Token) -> bytes:
        """Build the event of one token, to be written at once."""
        ask, choice = self._ask, token.choice
        if token.finish:
            last = {} if ask.usage else _FINGERPRINT
            event = self._event([_piece(ask, choice, token.text, token.finish)], **last)
        else:
            before, after = self._plain[choice]
            event = before + _ESCAPED[token.text] + after
        if ask.continuous:
            event += b',"usage":' + encode(self._usage_so_far(token.ordinal))
        if self._emission:
            event += b',"emitted_ns":%d' % time.monotonic_ns()
        return event + b"}\n\n"

    def ending(self, written: int, fault: Fault | None) -> Iterator[bytes]:
        """End the stream of so many tokens: properly, with an error, or not at all."""
        if fault == "error":
            yield _ERROR
        elif fault is None and self._ask.usage:
            yield self._event([], usage=_usage(self._ask.prompt, written), **_FINGERPRINT) + b"}\n\n"
        if fault != "early end":
            yield _DONE

    def _event(self, choices: list[Json], **more: object) -> bytes:
        """Encode an event up to its closing brace."""
        return b"data: " + encode({**self._identity, "choices": choices, **more})[:-1]

    def _usage_so_far(self, ordinal: int) -> Json:
        details = {"completion_tokens_details": None} if self._ask.chat else {}
        return _usage(self._ask.prompt, ordinal) | details


def _piece(ask: _Ask, choice: int, text: str, finish: str | None) -> Json:
    """Return the choice object of a token event."""
    piece: Json = {"index": choice, **({"delta": {"content": text}} if ask.chat else {"text": text})}
    piece |= {"logprobs": None, "finish_reason": finish}
    if finish or not ask.chat:
        piece["stop_reason"] = None
    if not ask.chat:
        piece["prompt_token_ids"] = None
    return piece | {"token_ids": None}


def _answer(profile: Profile, ask: _Ask, tokens: list[_Token]) -> Json:
    """Return the body of an answer that is not streamed."""
    choices = []
    for choice in range(ask.body.n):
        own = [token for token in tokens if token.choice == choice]
        text = "".join(token.text for token in own)
        said: Json = {"text": text, **_TEXT_CHOICE_NULLS}
        if ask.chat:
            said = {"message": {"role": "assistant", "content": text, **_MESSAGE_NULLS}}
        choices.append({"index": choice, **said, **_CHOICE_NULLS, "finish_reason": own[-1].finish})
    answer = _identity(profile, ask, "chat.completion" if ask.chat else "text_completion")
    answer |= {"choices": choices, **_FINGERPRINT, "usage": _usage(ask.prompt, len(tokens)) | _USAGE_NULLS}
    return answer | _NULLS | (_CHAT_NULLS if ask.chat else {})


def _identity(profile: Profile, ask: _Ask, kind: str) -> Json:
    ident = f"{'chatcmpl' if ask.chat else 'cmpl'}-{time.monotonic_ns():016x}"
    return {"id": ident, "object": kind, "created": int(time.time()), "model": profile.model}


def _usage(prompt: int, completion: int) -> Json:
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def _models(profile: Profile) -> Json:
    about = {"id": profile.model, "object": "model", "created": int(time.time()), "owned_by": "vllm"}
    about |= {"root": profile.model, "parent": None, "max_model_len": profile.max_model_len, "permission": []}
    return {"object": "list", "data": [about]}


class _Part(msgspec.Struct):
    text: str = ""


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Body(msgspec.Struct):
    """The fields of a request body that mean something here; others may be there."""

    model: str | None = None
    prompt: str | list[int] = ""
    messages: list[_Message] | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    n: int = 1
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False


class _Ask(NamedTuple):
    """A valid request."""

    body: _Body
    chat: bool
    prompt: int  # its tokens
    limit: int  # tokens of a choice at most

    @property
    def usage(self) -> bool:
        """Usage ends the stream."""
        return self.body.stream_options is not None and self.body.stream_options.include_usage

    @property
    def continuous(self) -> bool:
        """Usage is in every event."""
        options = self.body.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats


class _RefusedError(Exception):
    """A request that is answered by an error object."""

    def __init__(self, message: str, param: str | None, status: int = 400, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.status = status
        self.body: Json = {"error": {"message": message, "type": kind, "param": param, "code": status}}


def _ask(profile: Profile, raw: bytes, *, chat: bool) -> _Ask:
    """Read a request, or refuse it, as vLLM would."""
    body = _body(raw)
    if chat and body.messages is None:
        detail = {"type": "missing", "loc": "body.messages", "msg": "Field required"}
        raise _invalid(detail, "body.messages")
    if body.model not in (None, profile.model):
        message = f"The model `{body.model}` does not exist. Valid aliases: {profile.model}."
        raise _RefusedError(message, "model", 404, "NotFoundError")
    prompt = sum(map(_message_tokens, body.messages or [])) if chat else _tokens(body.prompt)
    asked = body.max_completion_tokens if chat and body.max_completion_tokens is not None else body.max_tokens
    _check(body, prompt, asked, profile.max_model_len)
    room = profile.max_model_len - prompt
    return _Ask(body, chat, prompt, room if asked is None else min(asked, room))


def _body(raw: bytes) -> _Body:
    try:
        return msgspec.json.decode(raw, type=_Body)
    except msgspec.DecodeError as error:
        path = str(error).partition("`$")[2]  # as in: Expected `int`, got `str` - at `$.n`
        raise _invalid(error, "body" + path.rstrip("`")) from None


def _check(body: _Body, prompt: int, asked: int | None, longest: int) -> None:
    """Refuse what a model of this length cannot do with a prompt of so many tokens."""
    if body.stream_options is not None and not body.stream:
        raise _unfit(None, "stream_options", "Stream options can only be defined when `stream=True`.")
    if body.n < 1:
        raise _unfit(body.n, "n", f"n must be at least 1, got {body.n}.")
    if asked is not None and asked < 1:
        raise _unfit(asked, "max_tokens", f"max_tokens must be at least 1, got {asked}.")
    if asked is not None and asked > longest:
        text = f"max_tokens={asked} cannot be greater than max_model_len={longest}."
        raise _unfit(asked, "max_tokens", f"{text} Please request fewer output tokens.")
    if asked is not None and asked < body.min_tokens:
        text = f"min_tokens must be less than or equal to max_tokens={asked}, got {body.min_tokens}."
        raise _RefusedError(text, None)
    if prompt == 0:
        raise _unfit(None, "prompt", "Either prompt or prompt_embeds must be provided and non-empty.")
    if prompt >= longest:  # an answer has at least one token
        text = f"This model's maximum context length is {longest} tokens. However, your prompt contains"
        text += f" {prompt} input tokens, which exceeds this limit even without any output tokens."
        raise _unfit(prompt, "input_tokens", f"{text} Please reduce the length of the input prompt.")


def _invalid(detail: object, where: str) -> _RefusedError:
    return _RefusedError(f"1 validation error:\n  {detail}", where, kind="Bad Request")


def _unfit(value: int | None, param: str, text: str) -> _RefusedError:
    shown = f"parameter={param}" if value is None else f"parameter={param}, value={value}"
    return _RefusedError(f"{text} ({shown})", param)


def _message_tokens(message: _Message) -> int:
    content = message.content or ""
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    return MESSAGE_TOKENS + _tokens(text)


def _tokens(prompt: str | list[int]) -> int:
    return math.ceil(len(prompt.encode()) / 4) if isinstance(prompt, str) else len(prompt)


def _reply(respond: StartResponse, status: int, payload: Json | bytes, **headers: str) -> list[bytes]:
    """Answer at once: JSON, or bytes as they are."""
    body = payload if isinstance(payload, bytes) else encode(payload)
    if not isinstance(payload, bytes):
        headers["Content-Type"] = "application/json"
    headers["Content-Length"] = str(len(body))
    respond(f"{status} {HTTPStatus(status).phrase}", list(headers.items()))
    return [body]


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
