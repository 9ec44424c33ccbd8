"""The little language of limits: what is printed can be parsed, and what is refused says what is accepted."""

import math
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_locust.errors import InputError
from vllm_locust.limit import PLAIN, REQUEST_METRICS, Goodput, Limit, Unit, of_options, parse, parse_good, split
from vllm_locust.timeline import METRICS


class Texts(NamedTuple):
    """What a scenario file brings along."""

    limits: tuple[str, ...] = ()
    goodput: tuple[str, ...] = ()


# Limits

scopes = st.just("") | st.text(st.characters(exclude_categories=("C", "Z")), min_size=1).filter(
    lambda name: name != "all"
)
statistics = st.sampled_from(["mean", "min", "max"]) | st.integers(1, 99_999).map(
    lambda number: f"p{number / 1000:.3f}".rstrip("0").rstrip(".")
)
seconds = st.integers(1, 10**15).map(lambda ns: round(ns / 1e9, 9)) | st.integers(1, 10**6).map(float)
numbers = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
shares = st.integers(1, 99_999).map(lambda number: number / 100_000) | st.floats(1e-9, 1, exclude_max=True)
comparisons = st.sampled_from(["<", "<=", ">", ">="])


@st.composite
def limits(draw: st.DrawFn) -> Limit:
    metric = draw(st.sampled_from([*METRICS, *PLAIN]))
    unit = PLAIN[metric] if metric in PLAIN else Unit(METRICS[metric].unit)
    if metric == "goodput":
        unit = draw(st.sampled_from([Unit.SHARE, Unit.PER_S]))
    bound = draw({Unit.SECONDS: seconds, Unit.SHARE: shares}.get(unit, numbers))
    return Limit(
        metric=metric,
        comparison=draw(comparisons),
        bound=bound,
        unit=unit,
        scope=draw(scopes),
        statistic="" if metric in PLAIN else draw(statistics),
    )


@given(limits())
def test_a_limit_prints_itself_in_a_form_that_is_the_same_limit_again(limit: Limit) -> None:
    assert parse(str(limit)) == limit


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("short: ttft p95 < 300ms", "short: ttft p95 < 300ms"),
        ("all:ttft P95<0.3s", "ttft p95 < 300ms"),
        ("  TTFT   mean <= 1m30s ", "ttft mean <= 90s"),
        ("itl p99.90 < 1,500us", "itl p99.9 < 1.5ms"),
        ("e2el max >= 250 ns", "e2el max >= 250ns"),
        ("ns:v2: tpot p50 > 5ms", "ns:v2: tpot p50 > 5ms"),
        ("output_tokens min > 1000", "output_tokens min > 1,000"),
        ("failures<0.5 %", "failures < 0.5%"),
        ("failures <= 0.005", "failures <= 0.5%"),
        ("failures <= 0%", "failures <= 0%"),
        ("goodput > 95%", "goodput > 95%"),
        ("goodput > 10", "goodput > 10/s"),
        ("goodput > 10/s", "goodput > 10/s"),
        ("output_tokens_per_s > 8000", "output_tokens_per_s > 8,000"),
        ("request_per_s > 1,234.5", "request_per_s > 1,234.5"),
        ("会話: ttft p95 < 1s", "会話: ttft p95 < 1s"),
        ("ttft p05 > 0s", "ttft p5 > 0s"),
    ],
)
def test_a_limit_is_read_as_people_write_it_and_printed_in_one_form(text: str, canonical: str) -> None:
    assert str(parse(text)) == canonical


def test_a_limit_has_its_bound_in_one_unit() -> None:
    limit = parse("short: ttft p99.9 < 700ms")
    assert (limit.scope, limit.metric, limit.statistic, limit.quantile) == ("short", "ttft", "p99.9", 0.999)
    assert (limit.bound, limit.bound_ns, limit.unit) == (0.7, 700_000_000, Unit.SECONDS)
    assert (limit.subject, limit.condition) == ("short: ttft p99.9", "< 700ms")
    assert parse("failures < 0.7%").bound == 7 / 1000  # what a share of counts is compared with
    assert parse("ttft max < 1s").quantile is None


@pytest.mark.parametrize(
    ("text", "met", "missed"),
    [
        ("ttft p95 < 300ms", 0.2999, 0.3),
        ("ttft p95 <= 300ms", 0.3, math.inf),
        ("request_per_s > 10", 10.1, 10.0),
        ("request_per_s >= 10", 10.0, 9.9),
        ("failures <= 0.7%", 7 / 1000, 8 / 1000),
        ("failures < 0.7%", 6 / 1000, 7 / 1000),
    ],
)
def test_a_value_meets_a_limit_or_does_not(text: str, met: float, missed: float) -> None:
    assert (parse(text).met_by(met), parse(text).met_by(missed)) == (True, False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["not one comparison", "short: ttft p95 < 300ms", "<, <=, >, >="]),
        ("ttft p95 300ms", ["not one comparison"]),
        ("ttft p95 = 300ms", ["not one comparison"]),
        ("1s < ttft p95 < 2s", ["not one comparison"]),
        ("ttft p95 == 300ms", ["not one comparison"]),
        ("< 300ms", ["no metric ''", "there are ttft, itl,", "failures"]),
        ("ttfb p95 < 300ms", ["no metric 'ttfb'", "there are ttft, itl,", "output_tokens_per_s"]),
        ("ttft < 300ms", ["a statistic is missing of ttft", "mean, min, max or a percentile like p95"]),
        ("ttft p95 p99 < 300ms", ["'p95 p99' is not one statistic"]),
        ("ttft median < 300ms", ["no statistic 'median'", "mean, min, max or"]),
        ("ttft p100 < 300ms", ["no statistic 'p100'"]),
        ("ttft p0 < 300ms", ["no statistic 'p0'"]),
        ("ttft p99.9999 < 300ms", ["no statistic"]),
        ("ttft p95 < 300", ["'300' has no unit", "300ms or 2s"]),
        ("ttft p95 <", ["'' is not a duration", "300ms"]),
        ("ttft p95 < soon", ["'soon' is not a duration", "300ms"]),
        ("ttft p95 < -1s", ["'-1s' is not a duration"]),
        (f"ttft p95 < {'9' * 400}s", ["is not a duration"]),
        ("failures p95 < 1%", ["failures has no statistic", "failures < 1%"]),
        ("failures < many", ["'many' is not a share", "5% or 0.05"]),
        ("failures < 5", ["'5' is not a share"]),
        ("failures < 0%", ["nothing is < 0%", "<="]),
        ("goodput > 100%", ["nothing is > 100%", ">="]),
        ("goodput > 101%", ["'101%' is not a share"]),
        ("ttft p95 < 0s", ["nothing is < 0s"]),
        ("output_tokens mean > 5ms", ["'5ms' is not a number", "8,000"]),
        ("request_per_s > 1,2", ["'1,2' is not a number"]),
        (f"request_per_s > {'9' * 400}", ["is not a number"]),
        (": ttft p95 < 1s", ["no part before the colon", "all"]),
    ],
)
def test_what_is_no_limit_is_refused_with_the_text_and_what_is_accepted(text: str, words: list[str]) -> None:
    with pytest.raises(InputError) as refused:
        parse(text)
    message = str(refused.value)
    assert message.startswith(f"--limit: {text!r}: ")
    assert [word for word in words if word not in message] == []


@given(st.text(st.sampled_from("ttftp95 <>=:,.%msfailuresgoodput0123456789;/é"), max_size=30))
def test_any_text_is_either_a_limit_or_refused_as_input(text: str) -> None:
    try:
        limit = parse(text)
    except InputError:
        return
    assert parse(str(limit)) == limit


def test_a_text_whose_key_names_the_part_has_none_of_its_own() -> None:
    assert str(parse("ttft p95 < 1s", scope="a: b", where="f.toml: limits.x")) == "a: b: ttft p95 < 1s"
    assert parse("ttft p95 < 1s", scope="all") == parse("ttft p95 < 1s")
    with pytest.raises(InputError, match=r"^f\.toml: limits\.x: 'b: ttft p95 < 1s': the key names the part"):
        parse("b: ttft p95 < 1s", scope="a", where="f.toml: limits.x")


# Good requests

good_limits = st.lists(st.sampled_from(REQUEST_METRICS), min_size=1, unique=True).flatmap(
    lambda metrics: st.tuples(
        *(
            st.builds(
                Limit,
                metric=st.just(metric),
                comparison=st.sampled_from(["<", "<="]),
                bound=seconds,
                unit=st.just(Unit.SECONDS),
            )
            for metric in metrics
        )
    )
)


@given(st.dictionaries(scopes, good_limits, min_size=1, max_size=3))
def test_what_a_good_request_is_prints_itself_in_texts_that_mean_the_same(
    by_scope: dict[str, tuple[Limit, ...]],
) -> None:
    goodput = Goodput(
        tuple(msgspec.structs.replace(limit, scope=scope) for scope, found in by_scope.items() for limit in found)
    )
    assert Goodput(tuple(limit for text in goodput.texts for limit in parse_good(text))) == goodput
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(goodput), type=Goodput) == goodput


def test_a_part_has_its_own_limit_on_a_metric_before_that_of_all() -> None:
    goodput = Goodput((*parse_good("ttft < 300ms, tpot <= 1,200ms"), *parse_good("long: ttft < 2s")))
    assert [str(limit) for limit in goodput.of("short")] == ["ttft < 300ms", "tpot <= 1.2s"]
    assert [str(limit) for limit in goodput.of("long")] == ["long: ttft < 2s", "tpot <= 1.2s"]
    assert goodput.texts == ("ttft < 300ms, tpot <= 1.2s", "long: ttft < 2s")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["not one comparison", "ttft < 300ms, tpot < 50ms"]),
        ("ttft:300 tpot:50", ["not one comparison"]),
        ("ttft < 300ms,", ["not one comparison"]),
        ("ttft p95 < 300ms", ["a request has no 'ttft p95'", "ttft, tpot, e2el"]),
        ("itl < 300ms", ["a request has no 'itl'"]),
        ("ttft > 300ms", ["ttft > asks for slow requests", "< and <="]),
        ("ttft < 300", ["has no unit"]),
        ("ttft < 300ms, ttft < 200ms", ["ttft of all parts has several limits"]),
    ],
)
def test_what_makes_no_good_request_is_refused_with_what_is_accepted(text: str, words: list[str]) -> None:
    with pytest.raises(InputError) as refused:
        parse_good(text)
    message = str(refused.value)
    assert message.startswith(f"--goodput: {text!r}: ")
    assert [word for word in words if word not in message] == []


# Of a run


def shown(found: tuple[tuple[Limit, ...], Goodput | None]) -> tuple[list[str], list[str]]:
    return [str(limit) for limit in found[0]], [*(found[1].texts if found[1] else ())]


def test_an_option_replaces_what_a_scenario_says_of_the_same_and_nothing_else() -> None:
    scenario = Texts(
        ("ttft p95 < 1s", "short: ttft p95 < 1s", "ttft p99 < 2s", "goodput > 95%", "failures < 1%"),
        ("ttft < 1s, tpot < 50ms", "long: ttft < 2s"),
    )
    found = of_options("ttft p95 <= 300ms; goodput > 10/s", "ttft < 300ms", [scenario], ["short", "long"])
    assert shown(found) == (
        [
            "short: ttft p95 < 1s",
            "ttft p99 < 2s",
            "goodput > 95%",
            "failures < 1%",
            "ttft p95 <= 300ms",
            "goodput > 10/s",
        ],
        ["tpot < 50ms, ttft < 300ms", "long: ttft < 2s"],
    )


def test_without_limits_there_are_none() -> None:
    assert of_options(None, "", [Texts()], []) == ((), None)


def test_several_scenarios_bring_their_limits_together_each_once() -> None:
    a, b = Texts(("failures < 1%", "a: ttft p95 < 1s")), Texts(("failures < 1%", "b: ttft p95 < 2s"))
    found = of_options(None, None, [a, b], ["a", "b"])
    assert shown(found) == (["failures < 1%", "a: ttft p95 < 1s", "b: ttft p95 < 2s"], [])


def test_what_good_requests_are_is_said_once() -> None:
    with pytest.raises(InputError, match=r"^--goodput: ttft of all parts has several limits"):
        of_options(None, "ttft < 1s; ttft < 2s", [], [])
    with pytest.raises(InputError, match=r"^goodput of several scenarios: ttft of all parts"):
        of_options(None, None, [Texts(goodput=("ttft < 1s",)), Texts(goodput=("ttft < 2s",))], [])


def test_a_limit_on_a_part_that_is_not_sent_is_refused_from_an_option_and_left_out_from_a_scenario() -> None:
    scenario = Texts(("long: ttft p95 < 1s", "ttft p95 < 1s"), ("long: ttft < 1s", "ttft < 1s"))
    assert shown(of_options(None, None, [scenario], ["short"])) == (["ttft p95 < 1s"], ["ttft < 1s"])
    with pytest.raises(InputError, match=r"^--limit: 'long: ttft p95 < 1s': no part 'long'; there are short, all$"):
        of_options("long: ttft p95 < 1s", None, [scenario], ["short"])
    with pytest.raises(InputError, match=r"^--goodput: 'long: ttft < 1s': no part 'long'; there are short, all$"):
        of_options(None, "long: ttft < 1s", [scenario], ["short"])


def test_where_labels_are_anybodys_nothing_is_known_to_be_missing() -> None:
    scenario = Texts(("long: ttft p95 < 1s",))
    found = of_options("mine: ttft p95 < 1s", None, [scenario], None)
    assert shown(found)[0] == ["long: ttft p95 < 1s", "mine: ttft p95 < 1s"]


@pytest.mark.parametrize(
    ("limit", "goodput", "refused"),
    [
        ("goodput > 95%", None, r"^limit 'goodput > 95%': nothing says what a good request is; give --goodput 'ttft"),
        ("long: goodput > 1", "short: ttft < 1s", r"what a good request of long is; give --goodput"),
        ("long: goodput > 1", "ttft < 1s", None),
        ("goodput > 1", "short: ttft < 1s", None),
    ],
)
def test_goodput_without_limits_of_requests_is_refused(limit: str, goodput: str | None, refused: str | None) -> None:
    if refused is None:
        assert of_options(limit, goodput, [], ["short", "long"])[1] is not None
    else:
        with pytest.raises(InputError, match=refused):
            of_options(limit, goodput, [], ["short", "long"])


def test_one_text_may_hold_several_limits() -> None:
    assert split(" a < 1; b < 2 ;; ") == ("a < 1", "b < 2")
    assert split(None) == split("") == ()
