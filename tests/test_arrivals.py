"""Schedules of an open loop: the same everywhere, split without a gap, with the law and the rate they are named for."""

import json
import math
from bisect import bisect_left
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice, pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_locust import arrivals as arrivals_module
from vllm_locust.arrivals import (
    PROCESSES,
    Arrivals,
    Segment,
    offsets_ns,
    read_trace,
    slice_of,
)
from vllm_locust.errors import InputError

S = 1_000_000_000
QUANTUM = 2.0**-30
"""To which the points of a process are rounded, in arrivals."""
KS_ONE_IN_A_THOUSAND = 1.95
"""Of Kolmogorov's distribution: √n · D is above it once in a thousand samples of the right law."""


def steady(process: str, per_s: float = 1.0, *, burstiness: float = 1.0, seed: int = 0) -> Arrivals:
    return Arrivals(process=process, profile=(Segment(per_s),), burstiness=burstiness, seed=seed)


def first(arrivals: Arrivals, count: int) -> list[int]:
    return list(islice(offsets_ns(arrivals), count))


rates = st.one_of(st.just(0.0), st.floats(0.5, 500.0), st.integers(1, 500).map(float))
lengths = st.one_of(st.integers(1, 20 * S), st.integers(1, 20).map(lambda seconds: seconds * S))
stretches = st.builds(Segment, rates, lengths, st.booleans())
endings = st.one_of(stretches, st.builds(Segment, rates))
profiles = st.builds(lambda before, last: (*before, last), st.lists(stretches, max_size=5), endings).filter(
    lambda profile: any(segment.rate_per_s for segment in profile)
)
schedules = st.one_of(
    st.builds(
        Arrivals,
        process=st.sampled_from(["constant", "poisson", "gamma"]),
        profile=profiles,
        burstiness=st.floats(0.05, 20.0),
        seed=st.integers(-(2**63), 2**64 - 1),  # what msgpack carries
    ),
    st.lists(st.integers(0, 10**12), min_size=1, max_size=50).map(
        lambda times: Arrivals(process="trace", trace_ns=b"".join(t.to_bytes(8, "little") for t in sorted(times)))
    ),
)


def spans(profile: tuple[Segment, ...]) -> Iterator[tuple[Fraction, Fraction | None, Fraction, Fraction]]:
    """Yield begin and end in seconds, and both rates, of all of a profile; the last one has no end."""
    begin, rate = Fraction(0), Fraction(0)
    for segment in profile:
        to = Fraction(segment.rate_per_s)
        end = None if segment.length_ns is None else begin + Fraction(segment.length_ns, S)
        yield begin, end, rate if segment.ramp else to, to
        if end is None:
            return
        begin, rate = end, to
    yield begin, None, rate, rate


def rate_and_integral(profile: tuple[Segment, ...], at_ns: int) -> tuple[Fraction, Fraction]:
    """Return the higher rate around an instant, and the integral of the rate up to it: the definition, in fractions."""
    total, at, around = Fraction(0), Fraction(at_ns, S), Fraction(0)
    for begin, end, low, high in spans(profile):
        if at < begin:
            break
        until = at if end is None else min(at, end)
        slope = 0 if end is None else (high - low) / (end - begin)
        total += low * (until - begin) + slope * (until - begin) ** 2 / 2
        if end is None or at <= end:
            around = max(around, low, high)
    return around, total


@given(schedules, st.integers(1, 7))
@settings(deadline=None)
def test_the_slices_of_all_ranks_are_the_whole_schedule(arrivals: Arrivals, ranks: int) -> None:
    whole = list(enumerate(first(arrivals, 3000)))
    slices = [list(islice(slice_of(arrivals, rank, ranks), 3000)) for rank in range(ranks)]
    for rank, taken in enumerate(slices):
        assert [k % ranks for k, _ in taken] == [rank] * len(taken)
    assert sorted(arrival for taken in slices for arrival in taken)[: len(whole)] == whole


@given(schedules)
@settings(deadline=None)
def test_offsets_never_fall_and_never_come_before_the_start(arrivals: Arrivals) -> None:
    offsets = first(arrivals, 3000)
    assert all(type(offset) is int and offset >= 0 for offset in offsets)
    assert all(earlier <= later for earlier, later in pairwise(offsets))


@given(profiles)
@settings(deadline=None)
def test_the_kth_request_leaves_when_the_integral_of_the_rate_is_k(profile: tuple[Segment, ...]) -> None:
    for k, offset in list(enumerate(first(Arrivals(process="constant", profile=profile), 1500)))[::23]:
        rate, integral = rate_and_integral(profile, offset)
        # One nanosecond of rounding, and a quantum for each stretch.
        assert abs(integral - k) <= rate * Fraction(1, S) + (len(profile) + 1) * Fraction(QUANTUM)


@given(profiles)
@settings(deadline=None)
def test_each_stretch_of_a_constant_process_has_its_integral_of_requests(profile: tuple[Segment, ...]) -> None:
    offsets = first(Arrivals(process="constant", profile=profile), 5000)
    for begin, end, low, high in spans(profile):
        if end is not None and (len(offsets) < 5000 or end * S < offsets[-1]):
            count = bisect_left(offsets, end * S) - bisect_left(offsets, begin * S)
            assert abs(count - (low + high) / 2 * (end - begin)) <= 1


@pytest.mark.parametrize(("process", "burstiness"), [("poisson", 1.0), ("gamma", 0.25), ("gamma", 4.0)])
def test_each_stretch_of_a_random_process_has_about_its_integral_of_requests(process: str, burstiness: float) -> None:
    profile = (Segment(40, 60 * S), Segment(200, 60 * S, ramp=True), Segment(0, 30 * S), Segment(20, 120 * S))
    profile = (*profile, Segment(0, 60 * S, ramp=True))
    expected = [40 * 60, 120 * 60, 0, 20 * 120, 10 * 60]
    edges = [0, 60, 120, 150, 270, 330]
    offsets = list(offsets_ns(Arrivals(process=process, profile=profile, burstiness=burstiness, seed=5)))
    for (begin, end), mean in zip(pairwise(edges), expected, strict=True):
        count = sum(begin * S <= offset < end * S for offset in offsets)
        assert abs(count - mean) <= 4 * math.sqrt(mean / burstiness)  # of gaps with this variance, four sigma
    assert offsets[-1] < 330 * S


@pytest.mark.parametrize(("per_s", "count"), [(0.07, 7), (4.35, 435), (3.0, 300)])
def test_nobody_leaves_in_a_pause_and_whom_its_begin_would_meet_leaves_at_its_end(per_s: float, count: int) -> None:
    # As floats have it, the first product is above its count, the second below.
    assert (0.07 * 100 > 7, 4.35 * 100 < 435) == (True, True)
    profile = (Segment(per_s, 100 * S), Segment(0, 5 * S), Segment(10))
    offsets = first(Arrivals(process="constant", profile=profile), count + 2)
    assert offsets == [round(k / per_s * S) for k in range(count)] + [105 * S, round(105.1 * S)]


@given(st.integers(1, 10**6), st.integers(S, 10**14), st.integers(1, 1000))
def test_a_fall_to_0_is_right_up_to_its_last_quantum(milli_per_s: int, length_ns: int, quanta: int) -> None:
    fall = (Segment(milli_per_s / 1000, 1), Segment(0, length_ns, ramp=True))
    *_, piece, rest = arrivals_module._pieces((*fall, Segment(1)))
    (found,) = arrivals_module._warped(np.array([piece.end - quanta]), [piece, rest]).tolist()
    left_ns = math.sqrt(2 * quanta * QUANTUM * (length_ns / S) / (milli_per_s / 1000)) * S
    assert 1 + length_ns - found == pytest.approx(left_ns, rel=1e-12, abs=1)


def test_a_profile_that_begins_with_a_pause_begins_after_it() -> None:
    profile = (Segment(0, 3 * S), Segment(2))
    assert first(Arrivals(process="constant", profile=profile), 3) == [3 * S, round(3.5 * S), 4 * S]


def test_a_ramp_begins_at_the_rate_before_it_or_at_none_and_the_last_rate_holds() -> None:
    up = Arrivals(process="constant", profile=(Segment(2, 4 * S, ramp=True),))  # t²/4 up to 4 at 4 s
    assert first(up, 7) == [round(math.sqrt(4 * k) * S) for k in range(5)] + [round(4.5 * S), 5 * S]
    down = (Segment(3, 2 * S), Segment(1, 4 * S, ramp=True))  # 6 + 3 t - t²/4: 8 more in 4 s
    (tenth,) = first(Arrivals(process="constant", profile=down), 11)[10:]
    assert tenth == 2 * S + round((6 - math.sqrt(36 - 16)) * S)


def test_a_schedule_ends_where_the_rate_falls_to_0_for_ever() -> None:
    down = Arrivals(process="constant", profile=(Segment(10, 10 * S), Segment(0, 10 * S, ramp=True)))
    offsets = list(offsets_ns(down))
    assert len(offsets) == 150  # 0 … 149; that of 150 would be at the very end
    assert offsets[149] == 20 * S - round(math.sqrt(2) * S)
    assert list(offsets_ns(Arrivals(profile=(Segment(1e-6, 1), Segment(0))))) == []


def test_after_hours_a_request_still_leaves_on_its_nanosecond() -> None:
    count = 100_000
    assert first(steady("constant", 3.0), count) == [round(Fraction(k * S, 3)) for k in range(count)]  # 9 h
    for process, burstiness in (("poisson", 1.0), ("gamma", 0.5)):
        slow = first(steady(process, 0.5, burstiness=burstiness), count)  # 55 h
        fast = first(steady(process, 500.0, burstiness=burstiness), count)
        assert all(abs(late - 1000 * soon) <= 501 for late, soon in zip(slow, fast, strict=True))


@pytest.mark.parametrize("process", ["poisson", "gamma"])
def test_the_same_seed_gives_the_same_schedule_and_another_one_another(process: str) -> None:
    def of(seed: int) -> list[int]:
        return first(steady(process, 10, burstiness=0.5, seed=seed), 2000)

    assert of(7) == of(7)
    assert not set(of(7)) & set(of(8))


@pytest.mark.parametrize(
    ("process", "burstiness", "offsets", "far"),
    [
        ("constant", 1.0, [0, 100000000, 200000000, 300000000, 400000000], 10000000000000),
        ("poisson", 1.0, [196681052, 271183026, 322173395, 339787971, 462671250], 9992504889828),
        ("gamma", 0.25, [7362973, 21129662, 240403118, 255959412, 277941209], 9921425690502),
        ("gamma", 4.0, [70755815, 162970850, 315101521, 351883386, 427002424], 9990648523074),
    ],
)
def test_schedules_are_those_of_all_releases_and_machines(
    process: str, burstiness: float, offsets: list[int], far: int
) -> None:
    of_seed_1 = first(steady(process, 10, burstiness=burstiness, seed=1), 100_001)
    assert of_seed_1[:5] == offsets
    assert of_seed_1[100_000] == far


def test_gamma_with_burstiness_1_is_the_poisson_process() -> None:
    assert first(steady("gamma", seed=3), 3000) == first(steady("poisson", seed=3), 3000)


def gamma_share_below(shape: float, x: float) -> float:
    """Return the regularized incomplete gamma function, by its power series."""
    if x > shape + 40 + 12 * math.sqrt(shape):
        return 1.0
    term = total = 1 / shape
    n = shape
    while term > 1e-17 * total:
        n += 1
        term *= x / n
        total += term
    return total * math.exp(shape * math.log(x) - x - math.lgamma(shape))


def test_the_series_of_the_gamma_distribution_is_right_where_it_has_a_closed_form() -> None:
    for x in (1e-9, 0.1, 1.0, 5.0, 30.0):
        assert gamma_share_below(1.0, x) == pytest.approx(1 - math.exp(-x), rel=1e-6, abs=1e-12)
        assert gamma_share_below(0.5, x) == pytest.approx(math.erf(math.sqrt(x)), rel=1e-9)
        assert gamma_share_below(2.0, x) == pytest.approx(1 - (1 + x) * math.exp(-x), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("shape", [0.05, 0.3, 0.99, 1.0, 1.01, 2.5, 30.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_gaps_have_the_law_of_their_process(shape: float, seed: int) -> None:
    count = 20_000
    process = "poisson" if shape == 1 else "gamma"
    offsets = first(steady(process, 0.001, burstiness=shape, seed=seed), count)  # slow: nanoseconds do not show
    gaps = sorted((later - sooner) / 1000 / S for sooner, later in pairwise([0, *offsets]))
    # Of several that are alike (small shapes have many gaps of 0 quanta) the last one knows the share up to it.
    ends = [i for i in range(count) if i + 1 == count or gaps[i + 1] - gaps[i] > QUANTUM / 2]
    distance = max(abs((i + 1) / count - gamma_share_below(shape, shape * (gaps[i] + QUANTUM / 2))) for i in ends)
    assert distance * math.sqrt(count) < KS_ONE_IN_A_THOUSAND


@pytest.mark.parametrize("shape", [0.3, 1.0, 2.5])
def test_a_gap_says_nothing_about_the_next_one(shape: float) -> None:
    count = 20_000
    offsets = first(steady("gamma", 0.001, burstiness=shape, seed=4), count + 1)
    gaps = [(later - sooner) / 1000 / S for sooner, later in pairwise(offsets)]
    mean = sum(gaps) / count
    variance = sum((gap - mean) ** 2 for gap in gaps) / count
    together = sum((gap - mean) * (after - mean) for gap, after in pairwise(gaps)) / count
    assert abs(together / variance) < 4 / math.sqrt(count)


@given(schedules)
def test_a_schedule_survives_the_way_to_a_worker(arrivals: Arrivals) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(arrivals), type=Arrivals) == arrivals


@pytest.mark.parametrize("rate", [-1.0, math.nan, math.inf, 1e-7, 1e7])
def test_a_rate_that_nothing_can_have_is_refused(rate: float) -> None:
    with pytest.raises(InputError, match=r"expected 0, or from 1e-06 to 1,000,000 per second"):
        Segment(rate)


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (lambda: Segment(1.0, 0), "0 ns: expected more than none"),
        (lambda: Segment(1.0, 2**62), "less than 146 years"),
        (lambda: Segment(1.0, ramp=True), "needs a length"),
        (lambda: Arrivals(process="uniform", profile=(Segment(1.0),)), f"one of {', '.join(PROCESSES)}"),
        (Arrivals, "poisson arrivals: a trace needs"),
        (lambda: Arrivals(process="trace"), "trace arrivals: a trace needs"),
        (lambda: Arrivals(process="trace", trace_ns=bytes(8), profile=(Segment(1.0),)), "its offsets alone"),
        (lambda: Arrivals(profile=(Segment(1.0),), trace_ns=bytes(8)), "a rate profile alone"),
        (lambda: Arrivals(profile=(Segment(1.0), Segment(2.0, 1))), "only its last stretch may have no length"),
        (lambda: Arrivals(profile=(Segment(0.0, 5), Segment(0.0))), "nothing would ever be sent"),
        (lambda: Arrivals(profile=(Segment(1.0, 2**61),) * 2), "less than 146 years in all"),
        (lambda: Arrivals(profile=(Segment(1e6, 5000 * S),)), "at most 4,294,967,296 arrivals"),
        (
            lambda: steady("poisson", seed=2**64),
            "seed 18446744073709551616: expected a whole number of at most 64 bits",
        ),
        (lambda: steady("gamma", burstiness=0.0), "burstiness 0.0: expected a number from 1e-06 to 1,000,000"),
        (lambda: steady("gamma", burstiness=math.nan), "burstiness nan"),
    ],
)
def test_what_is_no_schedule_is_refused_with_what_is_accepted(refused: object, reason: str) -> None:
    assert callable(refused)
    with pytest.raises(InputError, match=reason):
        refused()


@pytest.mark.parametrize("burstiness", [1e-6, 1e6])
@pytest.mark.parametrize("per_s", [1e-6, 1e6])
def test_the_ends_of_what_is_accepted_work(burstiness: float, per_s: float) -> None:
    offsets = first(steady("gamma", per_s, burstiness=burstiness), 5000)
    assert len(offsets) == 5000
    assert all(0 <= earlier <= later <= 2**62 for earlier, later in pairwise(offsets))


def trace_of(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def offsets_of(path: Path, speed: float = 1.0) -> list[int]:
    return list(offsets_ns(Arrivals(process="trace", trace_ns=read_trace(path, speed))))


def test_a_trace_of_seconds_counts_from_its_first_line(tmp_path: Path) -> None:
    path = trace_of(tmp_path, {"at_s": 100.5, "user": "a"}, "", {"at_s": 101}, {"at_s": 101}, "  ", {"at_s": 103.25})
    assert offsets_of(path) == [0, S // 2, S // 2, round(2.75 * S)]


def test_a_trace_of_milliseconds_is_read_as_mooncake_has_it(tmp_path: Path) -> None:
    first_lines = [(27482, 6955), (30535, 6472), (30535, 26)]
    rows = [{"timestamp": at, "input_length": n, "output_length": 52, "hash_ids": [46, 47]} for at, n in first_lines]
    assert offsets_of(trace_of(tmp_path, *rows)) == [0, 3_053_000_000, 3_053_000_000]


def test_windows_line_ends_and_a_byte_order_mark_are_no_matter(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"timestamp": 5.5}\r\n\r\n{"timestamp": 7}\r\n')
    assert offsets_of(path) == [0, 1_500_000]


def test_at_speed_2_a_trace_comes_twice_as_fast(tmp_path: Path) -> None:
    path = trace_of(tmp_path, {"at_s": 1}, {"at_s": 2}, {"at_s": 4.5})
    assert offsets_of(path, 2.0) == [0, S // 2, round(1.75 * S)]
    assert offsets_of(path, 0.5) == [0, 2 * S, 7 * S]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"at_s": -1}', "`at_s` is -1; expected a number of at least 0"),
        ('{"at_s": true}', "`at_s` is True; expected a number"),
        ('{"at_s": "2"}', "`at_s` is '2'; expected a number"),
        ('{"at_s": null}', "`at_s` is None; expected a number"),
        ('{"at_s": NaN}', "not JSON"),
        ('{"at_s": 1e999}', "not JSON"),
        ('{"at_s": 1', "not JSON"),
        ('{"at_s": 0.5}', "earlier than the line before"),
        ('{"at_s": 1e30}', "more than 146 years after the first one"),
        (f'{{"at_s": 1{"0" * 400}}}', ""),
        ('{"timestamp": 2000}', "`timestamp` after lines with `at_s`; expected the same key"),
        ('{"timestamp": 2000, "at_s": 2}', "both keys; expected"),
        ('{"at": 2}', "no time; expected"),
        ("[2]", "a list; expected"),
        ("2", "a int; expected"),
        ("[" * 5000, "not JSON"),
    ],
)
def test_a_line_that_is_no_arrival_is_refused_with_its_number(tmp_path: Path, line: str, reason: str) -> None:
    path = trace_of(tmp_path, {"at_s": 1}, "", line, {"at_s": 9})
    with pytest.raises(InputError) as refused:
        read_trace(path, 1.0)
    assert str(refused.value).startswith(f"{path}:3: ")
    assert reason in str(refused.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"at_s": 1}\n{"at_s": 2, "user": "\xff"}\n')
    with pytest.raises(InputError, match=r"trace\.jsonl:2: "):
        read_trace(path, 1.0)


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_trace_without_an_arrival_is_refused(tmp_path: Path, text: str) -> None:
    path = trace_of(tmp_path, text)
    with pytest.raises(InputError, match="no arrival in it; expected lines like"):
        read_trace(path, 1.0)


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_trace(tmp_path / "none.jsonl", 1.0)


@pytest.mark.parametrize("speed", [0.0, -1.0, math.nan, math.inf])
def test_a_speed_that_is_not_above_0_is_refused(tmp_path: Path, speed: float) -> None:
    with pytest.raises(InputError, match="expected a number above 0; 2 is twice as fast"):
        read_trace(trace_of(tmp_path, {"at_s": 1}), speed)
