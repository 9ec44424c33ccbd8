"""The page that a scrape gets, beside the one that the client library writes."""

import gzip
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from vllm_locust.exposition import application, page

HARD = st.text(st.sampled_from('aé漢"\\\n{}=, #'), max_size=8)
VALUES = st.one_of(st.integers(0, 2**60), st.booleans(), st.floats(0), st.sampled_from([1e-9, 123456.7, 1e6, 1e15]))
LABELS = st.fixed_dictionaries({}, optional={"scenario": HARD, "endpoint": HARD, "le": st.just("0.5")})
SUFFIXES = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"], "summary": ["", "_count", "_sum"]}


@st.composite
def families(draw: st.DrawFn) -> list[Metric]:
    found = []
    for number in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["gauge", *SUFFIXES]))
        family = Metric(f"family_{number}", draw(HARD), kind)
        for _ in range(draw(st.integers(0, 4))):
            suffix = draw(st.sampled_from(SUFFIXES.get(kind, [""])))
            family.add_sample(f"{family.name}{suffix}", draw(LABELS), draw(VALUES))
        found.append(family)
    return found


class Fixed(CollectorRegistry):
    """A registry of some families."""

    def __init__(self, families: list[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Any:
        return iter(self._families)


@given(families())
def test_case_66_a_page_is_that_of_the_client_library_byte_by_byte(found: list[Metric]) -> None:
    registry = Fixed(found)
    assert page(found, openmetrics=False) == generate_latest(registry)
    assert page(found, openmetrics=True) == generate_openmetrics(registry)


def answered(accept: str, encoding: str) -> tuple[dict[str, str], bytes]:
    family = Metric("running", "Whether.", "gauge")
    family.add_sample("running", {}, 1)
    headers: dict[str, str] = {}
    environ = {"REQUEST_METHOD": "GET", "HTTP_ACCEPT": accept, "HTTP_ACCEPT_ENCODING": encoding}
    body = b"".join(application(Fixed([family]))(environ, lambda status, found: headers.update(found, status=status)))
    assert headers.pop("status") == "200 OK"
    assert headers.pop("Content-Length") == str(len(body))
    return headers, body


def test_who_asks_gets_the_format_and_the_encoding_that_it_knows() -> None:
    prometheus = (
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
        "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
        "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
    )
    headers, body = answered(prometheus, "gzip")
    assert headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(body) == b"# HELP running Whether.\n# TYPE running gauge\nrunning 1.0\n# EOF\n"
    headers, body = answered("text/html,*/*;q=0.8", "")
    assert headers == {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    assert body == b"# HELP running Whether.\n# TYPE running gauge\nrunning 1.0\n"
