"""What the server is: whether it is there, its model, its endpoints, whether it takes exact lengths.

Asked once, by the master, in a handful of requests whose answers cost the server nothing; `check` asks for real answers
besides. Everything that makes a run pointless is an error here, before the first request of the run.
"""

import ssl
from dataclasses import dataclass
from typing import Any

import msgspec
from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPParseError

from vllm_locust import api
from vllm_locust.errors import InputError, TargetError
from vllm_locust.origin import Origin, origin_of
from vllm_locust.quantity import format_list
from vllm_locust.secret import blotted
from vllm_locust.terminal import printable

_TIMEOUT_S = 10.0
_ANSWER_BYTES = 4_194_304
"""What is read of an answer: a server may have thousands of models, and say little of each."""
_PIECE_BYTES = 65_536
_MISSING = (404, 405, 501)
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a server turned out to be."""

    url: str
    model: str
    max_model_len: int | None
    """Longest context, where the server tells."""
    endpoints: tuple[str, ...]
    exact_length: bool
    """Whether it takes `min_tokens` and `ignore_eos`, as vLLM does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How to reach a server."""

    url: str
    api_key: str | None = None
    insecure: bool = False
    ca_pem: str | None = None


def probe(access: Access, *, model: str | None, endpoints: tuple[str, ...]) -> Target:
    """Find out what a server is; raises `TargetError`, or `InputError` for a model that it does not serve.

    `endpoints` are those that the run would use; the result names which of them are there.
    """
    if access.api_key and not (access.api_key.isascii() and access.api_key.isprintable()):
        raise InputError("--api-key (or OPENAI_API_KEY) has characters that no header can carry")
    models = _models(access)
    served = {str(entry.get("id")): entry for entry in models}
    there = tuple(endpoint for endpoint in endpoints if _has(access, endpoint))
    if not there:
        paths = format_list(api.PATHS[endpoint] for endpoint in endpoints)
        raise TargetError(f"{access.url} does not have {paths}; is this the address of an OpenAI-compatible server?")
    chosen = _choose(access, served, model)
    max_model_len = served.get(chosen, {}).get("max_model_len")
    return Target(
        url=access.url,
        model=chosen,
        max_model_len=max_model_len if isinstance(max_model_len, int) else None,
        endpoints=there,
        exact_length=_exact_length(access, chosen, there[0]),
    )


def count_tokens(access: Access, model: str, body: dict[str, Any]) -> int | None:
    """Return how many tokens a prompt or messages have, where the server tells (vLLM's `/tokenize`)."""
    status, answer = _request(access, "POST", "/tokenize", {"model": model, **body})
    try:
        return int(msgspec.json.decode(answer)["count"]) if status == 200 else None  # noqa: PLR2004
    except (*_NOT_JSON, TypeError, KeyError, ValueError):
        return None


def _models(access: Access) -> list[dict[str, Any]]:
    status, body = _request(access, "GET", "/v1/models")
    _check_access(access, status)
    if status in _MISSING:
        return []
    try:
        value = msgspec.json.decode(body)
        models = value["data"]
        if status == 200 and isinstance(models, list):  # noqa: PLR2004
            return [entry for entry in models if isinstance(entry, dict)]
    except (*_NOT_JSON, TypeError, KeyError):
        pass
    raise TargetError(
        f"{access.url}/v1/models answers HTTP {status}: {blotted(api.error_message(body), access.api_key)[:200]!r}; "
        "is --host the address of an OpenAI-compatible server?"
    )


def _check_access(access: Access, status: int) -> None:
    if status in (401, 403):
        raise TargetError(f"{access.url} refuses access (HTTP {status}); give its key by --api-key or OPENAI_API_KEY")


def _choose(access: Access, served: dict[str, Any], model: str | None) -> str:
    names = format_list(printable(name) for name in served)
    if model:
        if served and model not in served:
            raise InputError(f"--model {model!r} is not served by {access.url}; it serves {names}")
        return model
    if len(served) == 1:
        return next(iter(served))
    what = f"serves several models: {names}" if served else "does not say which model it serves"
    raise InputError(f"{access.url} {what}; name one by --model")


def _has(access: Access, endpoint: str) -> bool:
    """Tell whether an endpoint exists: one that does complains about an empty body, one that does not is not found."""
    status, body = _request(access, "POST", api.PATHS[endpoint], {})
    _check_access(access, status)  # some servers name their models to everybody
    return status not in _MISSING or "model" in api.error_message(body)


def _exact_length(access: Access, model: str, endpoint: str) -> bool:
    """Ask for a minimum above the maximum: who knows `min_tokens` refuses it, who does not ignores it."""
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]} if endpoint == "chat" else {"prompt": "a"}
    body = {"model": model, "max_tokens": 1, "min_tokens": 2, "ignore_eos": True, **prompt}
    status, answer = _request(access, "POST", api.PATHS[endpoint], body)
    return status in (400, 422) and "min_tokens" in answer.decode("utf-8", "replace")


def _request(access: Access, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    """Send one plain request; raises `TargetError` where no answer comes."""
    origin, prefix = origin_of(access.url, insecure=access.insecure, ca_pem=access.ca_pem)
    headers = {"Accept": "application/json", "Content-Type": "application/json"}
    if access.api_key:
        headers["Authorization"] = f"Bearer {access.api_key}"
    client = _client(origin, insecure=access.insecure)
    try:
        response = client.request(
            method, prefix + path, body=api.encode_body(body) if body is not None else b"", headers=headers
        )
        answer = bytearray()
        while len(answer) < _ANSWER_BYTES and (piece := response.read(_PIECE_BYTES)):
            answer += piece
        return response.status_code, bytes(answer)
    except ssl.SSLCertVerificationError as error:
        raise TargetError(
            f"{access.url}: its certificate is not trusted ({error.verify_message}); "
            "give its authority by --ca-file, or do without the check by --insecure"
        ) from None
    except (OSError, HTTPParseError) as error:
        raise TargetError(
            f"no answer from {access.url} ({error or type(error).__name__}); is --host right, is the server up?"
        ) from None
    finally:
        client.close()


def _client(origin: Origin, *, insecure: bool) -> HTTPClient:
    return HTTPClient(
        origin.host,
        port=origin.port,
        ssl=origin.tls is not None,
        ssl_context_factory=(lambda *_, **__: origin.tls) if origin.tls else None,
        insecure=insecure,  # else it puts the check back into our context
        connection_timeout=_TIMEOUT_S,
        network_timeout=_TIMEOUT_S,
    )
