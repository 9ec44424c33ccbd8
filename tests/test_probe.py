"""The probe finds out what a server is, and says in words what makes a run pointless."""

import json
from pathlib import Path
from typing import Any

import pytest
from emitter import CLOSE, LENGTH, RAW, Answer, Emitter, Server

from vllm_locust.errors import ExitCode, InputError, TargetError
from vllm_locust.origin import read_ca
from vllm_locust.probe import Access, Target, count_tokens, probe
from vllm_locust.simulator import Profile, Simulator

BOTH = ("chat", "completions")
FAST = {"ttft_s": 0.0, "itl_s": 0.0}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def replies(value: Any, status: str = "200 OK") -> Answer:
    return Answer([(0, json.dumps(value).encode())], status, "application/json", framing=LENGTH)


def page(html: bytes, status: str = "200 OK") -> Answer:
    return Answer([(0, html)], status, "text/html", framing=LENGTH)


def models(*names: str, **more: Any) -> Answer:
    return replies({"object": "list", "data": [{"id": name, "object": "model", **more} for name in names]})


NO_MODEL = replies({"error": {"message": "field required: model", "code": 400}}, "400 Bad Request")
NOT_FOUND = replies({"detail": "Not Found"}, "404 Not Found")
ANSWERED = replies({"choices": [{"index": 0, "message": {"content": "a"}}]})


def asked(server: Server, count: int = 1) -> list[str]:
    """Return what the server was asked, method and path."""
    return [" ".join(reply.request.decode().split(" ")[:2]) for reply in server.replies(count)]


def test_a_server_is_described() -> None:
    with Simulator(Profile(model="org/tiny", max_model_len=4096, **FAST)) as simulator:
        target = probe(Access(url=simulator.url), model=None, endpoints=BOTH)
        assert target == Target(
            url=simulator.url, model="org/tiny", max_model_len=4096, endpoints=BOTH, exact_length=True
        )


def test_the_address_may_end_with_v1() -> None:
    with Simulator(Profile(**FAST)) as simulator:
        target = probe(Access(url=f"{simulator.url}/v1"), model="simulated", endpoints=("completions",))
        assert (target.model, target.endpoints) == ("simulated", ("completions",))


def test_a_server_without_completions_has_chat() -> None:
    with Simulator(Profile(completions=False, **FAST)) as simulator:
        assert probe(Access(url=simulator.url), model=None, endpoints=BOTH).endpoints == ("chat",)
        with pytest.raises(TargetError, match="does not have /v1/completions"):
            probe(Access(url=simulator.url), model=None, endpoints=("completions",))


def test_a_model_that_is_not_served_is_refused_with_those_that_are() -> None:
    with Simulator(Profile(**FAST)) as simulator:
        with pytest.raises(InputError, match=r"--model 'other' is not served.*it serves simulated") as refused:
            probe(Access(url=simulator.url), model="other", endpoints=BOTH)
        assert refused.value.exit_code == ExitCode.BAD_INPUT


@pytest.mark.parametrize("key", [None, "wrong"])
def test_without_its_key_a_server_refuses_access_and_the_key_is_not_shown(key: str | None) -> None:
    with Simulator(Profile(api_key="secret", **FAST)) as simulator:
        with pytest.raises(TargetError, match=r"refuses access \(HTTP 401\).*--api-key or OPENAI_API_KEY") as refused:
            probe(Access(url=simulator.url, api_key=key), model=None, endpoints=BOTH)
        assert "wrong" not in str(refused.value)
        assert refused.value.exit_code == ExitCode.NOT_RUN
        assert probe(Access(url=simulator.url, api_key="secret"), model=None, endpoints=BOTH).endpoints == BOTH
        assert "secret" not in repr(refused.value)


def test_a_server_that_only_names_its_models_to_everybody_refuses_access(emitter: Emitter) -> None:
    locked = replies({"error": "Unauthorized"}, "401 Unauthorized")
    server = emitter.serve({"/v1/models": models("a"), "*": locked})
    with pytest.raises(TargetError, match="--api-key"):
        probe(Access(url=server.url), model=None, endpoints=BOTH)


def test_one_of_several_models_has_to_be_named(emitter: Emitter) -> None:
    routes = {"/v1/models": models("a", "b/c", max_model_len=2048), CHAT: NO_MODEL, "*": NOT_FOUND}
    server = emitter.serve(routes)
    with pytest.raises(InputError, match="several models: a, b/c; name one by --model"):
        probe(Access(url=server.url), model=None, endpoints=BOTH)
    target = probe(Access(url=server.url), model="b/c", endpoints=BOTH)
    assert (target.model, target.max_model_len, target.endpoints) == ("b/c", 2048, ("chat",))


@pytest.mark.parametrize("listed", [models(), NOT_FOUND])
def test_where_no_model_is_listed_any_may_be_named(emitter: Emitter, listed: Answer) -> None:
    server = emitter.serve({"/v1/models": listed, "*": NO_MODEL})
    with pytest.raises(InputError, match="does not say which model it serves; name one by --model"):
        probe(Access(url=server.url), model=None, endpoints=BOTH)
    target = probe(Access(url=server.url), model="mine", endpoints=BOTH)
    assert (target.model, target.max_model_len, target.endpoints) == ("mine", None, BOTH)


@pytest.mark.parametrize("odd", [None, "4096", 4096.5])
def test_a_context_that_is_no_number_is_not_known(emitter: Emitter, odd: object) -> None:
    server = emitter.serve({"/v1/models": models("a", max_model_len=odd), "*": NO_MODEL})
    assert probe(Access(url=server.url), model=None, endpoints=BOTH).max_model_len is None


def test_a_server_that_knows_no_min_tokens_has_no_exact_length(emitter: Emitter) -> None:
    server = emitter.serve({"/v1/models": models("a"), TEXT: NOT_FOUND, CHAT: ANSWERED})
    target = probe(Access(url=server.url), model=None, endpoints=BOTH)
    assert (target.endpoints, target.exact_length) == (("chat",), False)


def test_an_unknown_model_on_a_404_is_no_missing_endpoint(emitter: Emitter) -> None:
    unknown = replies({"error": {"message": "The model `` does not exist."}}, "404 Not Found")
    server = emitter.serve({"/v1/models": models("a"), CHAT: unknown, "*": NOT_FOUND})
    assert probe(Access(url=server.url), model=None, endpoints=BOTH).endpoints == ("chat",)


def test_probing_is_a_handful_of_requests_and_asks_for_no_answer(emitter: Emitter) -> None:
    server = emitter.serve({"/v1/models": models("a"), "*": NO_MODEL})
    probe(Access(url=server.url), model=None, endpoints=BOTH)
    assert sorted(asked(server, 4)) == ["GET /v1/models", f"POST {CHAT}", f"POST {CHAT}", f"POST {TEXT}"]


@pytest.mark.parametrize("model", [None, "mine"])
@pytest.mark.parametrize(
    "everything",
    [
        pytest.param(page(b"<html><h1>Welcome</h1>"), id="html-200"),
        pytest.param(page(b"<html><h1>Not Found</h1>", "404 Not Found"), id="html-404"),
        pytest.param(page(b"<h1>Bad gateway</h1>", "502 Bad Gateway"), id="html-502"),
        pytest.param(replies({"status": "ok"}), id="json"),
        pytest.param(replies([1]), id="list"),
        pytest.param(page(b'{"data":"\xff"}'), id="not-utf-8"),
        pytest.param(page(b"[" * 100_000), id="nested"),
        pytest.param(Answer([(0, b"SSH-2.0-OpenSSH\r\n")], framing=RAW, ending=CLOSE), id="ssh"),
        pytest.param(Answer([], framing=RAW, ending=CLOSE), id="hangs-up"),
    ],
)
def test_what_is_no_llm_server_is_said_to_be_none(emitter: Emitter, everything: Answer, model: str | None) -> None:
    server = emitter.serve(everything)
    with pytest.raises(TargetError, match=f"{server.url}.*(--host|OpenAI-compatible)") as refused:
        probe(Access(url=server.url), model=model, endpoints=BOTH)
    assert refused.value.exit_code == ExitCode.NOT_RUN
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://no-such-host.invalid:8000"])
def test_where_nobody_answers_the_address_is_asked_about(url: str) -> None:
    with pytest.raises(TargetError, match=f"no answer from {url} .*is --host right"):
        probe(Access(url=url), model=None, endpoints=BOTH)


def test_what_is_no_address_is_bad_input() -> None:
    with pytest.raises(InputError, match="write it like http://my-server:8000"):
        probe(Access(url="my-server"), model=None, endpoints=BOTH)


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"data":' * 2_000, b'{"data":[1e999]}', b'{"data":[{"id":"\\ud800"}]}', b"\xff"]
)
def test_what_is_no_list_of_models_is_said_in_words(emitter: Emitter, body: bytes) -> None:
    server = emitter.serve({"/v1/models": page(body), "*": NO_MODEL})
    with pytest.raises(TargetError, match="/v1/models answers HTTP 200: '"):
        probe(Access(url=server.url), model=None, endpoints=BOTH)


def test_an_answer_without_an_end_is_read_no_further_than_any_list_of_models_goes(emitter: Emitter) -> None:
    server = emitter.serve({"/v1/models": Answer([(0, b"x" * 65_536)] * 2_000), "*": NO_MODEL})
    with pytest.raises(TargetError, match="/v1/models answers HTTP 200: 'xxx"):
        probe(Access(url=server.url), model=None, endpoints=BOTH)
    assert len(server.replies(0)[0].sent) < 500


def test_tokens_are_counted_where_the_server_does(emitter: Emitter) -> None:
    none = [NOT_FOUND, page(b"<p>"), page(b'"\xff"'), page(b"[" * 100_000), replies([]), replies({})]
    server = emitter.serve([replies({"count": 5, "tokens": []}), *none])
    access = Access(url=server.url)
    assert [count_tokens(access, "a", {"prompt": "x"}) for _ in range(7)] == [5, *[None] * 6]
    assert json.loads(server.replies(7)[0].request.partition(b"\r\n\r\n")[2]) == {"model": "a", "prompt": "x"}


# TLS


@pytest.fixture
def secure(emitter: Emitter, pem: Path) -> str:
    return emitter.serve({"/v1/models": models("a"), "*": NO_MODEL}, certificate=pem).url


def test_a_certificate_of_an_unknown_authority_is_refused_with_both_ways_out(secure: str) -> None:
    with pytest.raises(TargetError, match=r"certificate is not trusted.*--ca-file.*--insecure"):
        probe(Access(url=secure), model=None, endpoints=BOTH)


def test_a_certificate_is_checked_against_the_given_authority(secure: str, pem: Path) -> None:
    assert probe(Access(url=secure, ca_pem=read_ca(str(pem))), model=None, endpoints=BOTH).model == "a"


def test_a_certificate_is_not_checked_where_that_is_asked_for(secure: str) -> None:
    assert probe(Access(url=secure, insecure=True), model=None, endpoints=BOTH).model == "a"


def test_a_server_without_tls_is_no_answer(emitter: Emitter) -> None:
    server = emitter.serve(models("a"), idle_close_s=0.1)
    with pytest.raises(TargetError, match="no answer from https:"):
        probe(Access(url=server.url.replace("http:", "https:")), model=None, endpoints=BOTH)


def test_a_name_that_is_not_in_the_certificate_is_refused(emitter: Emitter, pem: Path) -> None:
    server = emitter.serve({"/v1/models": models("a"), "*": NO_MODEL}, certificate=pem, host="127.0.0.2")
    with pytest.raises(TargetError, match="certificate is not trusted"):
        probe(Access(url=server.url, ca_pem=read_ca(str(pem))), model=None, endpoints=BOTH)
