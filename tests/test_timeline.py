"""The definitions of every metric, on requests whose right numbers are known."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_locust.timeline import METRICS, Outcome, Timeline, outcome_of_status

MS = 1_000_000
SENT = 1_000_000 * MS


def timeline(
    *tokens_ms: float,
    counts: tuple[int, ...] = (),
    usage: int | None = None,
    outcome: Outcome | None = Outcome.OK,
    done_ms: float = 455,
) -> Timeline:
    """Return a request of one choice whose token events came so long after it was sent, each in a read of its own."""
    made = Timeline("r1", "short", "chat", SENT - 5 * MS)
    made.sent_ns = SENT
    for i, at_ms in enumerate(tokens_ms):
        made.token_event(0, SENT + round(at_ms * MS), counts[i] if counts else 0)
        made.token_reads += 1
    made.completion_tokens = usage
    if outcome is not None:
        made.end(outcome, SENT + round(done_ms * MS))
    return made


def gaps_ms(made: Timeline) -> list[float]:
    return [gap / MS for gap in made.gaps_ns().tolist()]


def tpots_ms(made: Timeline) -> list[float]:
    return [tpot / MS for tpot in made.tpots_ns()]


def test_the_reference_stream_has_the_numbers_of_its_definition() -> None:
    ref = timeline(300, 350, 400, 450, usage=4)
    assert ref.ttft_ns == 300 * MS
    assert gaps_ms(ref) == [50, 50, 50]
    assert tpots_ms(ref) == [50]
    assert ref.output_tokens == 4
    assert not ref.estimated
    assert ref.e2el_ns == 450 * MS
    assert ref.response_time_ns == (5 + 455) * MS
    assert ref.ttfc_ns is None
    assert not ref.coalesced


def test_case_16_usage_long_after_the_last_token_moves_only_the_row_of_locust() -> None:
    late = timeline(300, 350, 400, 450, usage=4, done_ms=900)
    assert (late.ttft_ns, late.e2el_ns) == (300 * MS, 450 * MS)
    assert (gaps_ms(late), tpots_ms(late)) == ([50, 50, 50], [50])
    assert late.response_time_ns == (5 + 900) * MS


def test_case_21_time_to_first_token_counts_reasoning_and_first_content_has_a_name_of_its_own() -> None:
    reasoned = timeline(200, 250, 1000, usage=3, done_ms=1005)
    reasoned.reasoning_ns, reasoned.content_ns = SENT + 200 * MS, SENT + 1000 * MS
    assert (reasoned.ttft_ns, reasoned.ttfc_ns) == (200 * MS, 1000 * MS)
    assert gaps_ms(reasoned) == [50, 750]
    assert reasoned.output_tokens == 3
    only = timeline(200, 250, usage=2, done_ms=255)
    only.reasoning_ns = SENT + 200 * MS
    assert (only.ttft_ns, only.ttfc_ns) == (200 * MS, None)
    assert (gaps_ms(only), tpots_ms(only), only.output_tokens) == ([50], [50], 2)


def test_case_22_tokens_that_never_show_as_events_count_for_the_time_per_token() -> None:
    called = timeline(300, 460, usage=17, done_ms=470)
    assert called.ttft_ns == 300 * MS
    assert gaps_ms(called) == [160]
    assert (called.output_tokens, tpots_ms(called)) == (17, [10])


def test_case_23_one_token_has_a_first_and_a_last_but_neither_gap_nor_time_per_token() -> None:
    one = timeline(200, usage=1, done_ms=201)
    assert (one.ttft_ns, one.e2el_ns, one.output_tokens) == (200 * MS, 200 * MS, 1)
    assert (gaps_ms(one), tpots_ms(one), one.longest_gap_ns) == ([], [], None)
    assert one.response_time_ns == (5 + 201) * MS


def test_case_24_events_that_bundle_tokens_have_gaps_by_event_and_time_by_token() -> None:
    bundled = timeline(300, 340, 380, 420, counts=(4, 8, 12, 16), usage=16)
    assert gaps_ms(bundled) == [40, 40, 40]
    assert tpots_ms(bundled) == [8]
    first = timeline(300, 310, 320, 330, 340, 350, counts=(5, 6, 7, 8, 9, 10), usage=10)
    assert first.tpots_ns() == [50 * MS // 9]


def test_case_24_without_counts_by_event_usage_at_the_end_says_how_many_tokens_there_were() -> None:
    bundled = timeline(300, 340, 380, 420, usage=16)
    assert (bundled.output_tokens, tpots_ms(bundled)) == (16, [8])
    assert not bundled.estimated


def test_case_26_gaps_of_two_choices_are_never_mixed() -> None:
    two = Timeline("r1", "short", "chat", SENT)
    two.sent_ns = SENT
    for index, at_ms in ((0, 300), (1, 350), (0, 400), (1, 450), (0, 500), (1, 550)):
        two.token_event(index, SENT + at_ms * MS, 0)
        two.token_reads += 1
    two.completion_tokens = 6
    two.end(Outcome.OK, SENT + 555 * MS)
    assert two.ttft_ns == 300 * MS
    assert gaps_ms(two) == [100, 100, 100, 100]
    assert (two.output_tokens, tpots_ms(two)) == (6, [100, 100])
    assert two.e2el_ns == 550 * MS


def test_tokens_of_several_choices_are_shared_out_by_their_events_where_counts_are_not_told() -> None:
    two = timeline(300, 400, 500, usage=8)
    two.token_event(1, SENT + 600 * MS, 0)
    # Six of the eight tokens are those of the first choice, so 200 ms hold five gaps; the other has one event alone.
    assert two.tpots_ns()[0] == 200 * MS // 5


def test_tokens_of_several_choices_are_their_own_where_counts_are_told() -> None:
    two = timeline(300, 400, counts=(1, 11), usage=14)
    two.token_event(1, SENT + 400 * MS, 1)
    two.token_event(1, SENT + 520 * MS, 3)
    assert tpots_ms(two) == [10, 60]


def test_case_38_gaps_are_pooled_by_event_and_time_per_token_by_request() -> None:
    a = timeline(*(1000 + 10 * i for i in range(11)), usage=11)
    b = timeline(500, 600, usage=2)
    pooled = gaps_ms(a) + gaps_ms(b)
    assert (len(pooled), sum(pooled), max(pooled)) == (11, 200, 100)
    assert tpots_ms(a) + tpots_ms(b) == [10, 100]


def test_case_39_the_number_of_tokens_is_what_usage_says_else_what_events_carried_else_their_number() -> None:
    said = timeline(300, 350, 400, 450, counts=(1, 2, 3, 4), usage=9)
    assert (said.output_tokens, said.estimated, said.tpots_ns()) == (9, False, [150 * MS // 8])
    carried = timeline(300, 350, 400, 450, counts=(2, 4, 6, 8))
    assert (carried.output_tokens, carried.estimated) == (8, False)
    counted = timeline(300, 350, 400, 450)
    assert (counted.output_tokens, counted.estimated) == (4, True)


def test_case_42_a_gap_of_zero_is_a_gap() -> None:
    assert gaps_ms(timeline(300, 400, 400, 450, usage=4)) == [100, 0, 50]


@pytest.mark.parametrize(
    ("events", "reads", "coalesced"), [(7, 1, False), (8, 1, True), (8, 2, True), (8, 3, False), (100, 2, True)]
)
def test_case_33_eight_events_in_at_most_two_reads_are_coalesced_and_have_no_gaps(
    events: int, reads: int, *, coalesced: bool
) -> None:
    made = timeline(*([1000] * events), usage=events, done_ms=1000)
    made.token_reads = reads
    assert made.coalesced == coalesced
    assert len(made.gaps_ns()) == (0 if coalesced else events - 1)
    assert len(made.tpots_ns()) == (0 if coalesced else 1)
    assert (made.ttft_ns, made.e2el_ns) == (1000 * MS, 1000 * MS)


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome is not Outcome.OK])
def test_what_did_not_end_well_keeps_first_token_and_gaps_but_has_no_end(outcome: Outcome) -> None:
    failed = timeline(300, 350, usage=2, outcome=outcome)
    assert (failed.ttft_ns, gaps_ms(failed)) == (300 * MS, [50])
    assert (failed.e2el_ns, failed.tpots_ns()) == (None, [])


@pytest.mark.parametrize("outcome", Outcome)
def test_only_ok_and_cancelled_are_no_failures(outcome: Outcome) -> None:
    assert outcome.failed == (outcome not in ("ok", "cancelled"))


def test_without_a_token_event_nothing_is_zero() -> None:
    silent = timeline(outcome=Outcome.EMPTY)
    assert (silent.ttft_ns, silent.e2el_ns, silent.ttfc_ns, silent.first_ns) == (None, None, None, None)
    assert (gaps_ms(silent), silent.tpots_ns(), silent.output_tokens) == ([], [], 0)


def test_a_request_that_was_never_sent_has_no_samples() -> None:
    unsent = Timeline("r1", "short", "chat", SENT)
    unsent.end(Outcome.CONNECT_FAILED, SENT + 7 * MS, "refused")
    assert (unsent.ttft_ns, unsent.e2el_ns, unsent.response_time_ns) == (None, None, 7 * MS)


def test_a_message_is_one_line_of_at_most_200_characters() -> None:
    made = timeline(outcome=None)
    made.end(Outcome.HTTP_5XX, SENT, "bad\n\n  gateway\t" + "x" * 500)
    assert made.message.startswith("bad gateway x")
    assert len(made.message) == 200


@given(st.text(st.characters(), max_size=300))
def test_a_message_has_nothing_that_a_terminal_obeys_or_that_utf_8_does_not_know(text: str) -> None:
    made = timeline(outcome=None)
    made.end(Outcome.STREAM_ERROR, SENT, text)
    assert len(made.message) <= 200
    assert made.message.isprintable()
    made.message.encode()
    if text.isprintable():
        assert made.message == " ".join(text.split())[:200]


def test_a_request_ends_no_earlier_than_its_last_token() -> None:
    made = timeline(300, 350, done_ms=340)
    assert made.done_ns == SENT + 350 * MS


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (400, "http_4xx"),
        (404, "http_4xx"),
        (429, "http_429"),
        (500, "http_5xx"),
        (503, "http_5xx"),
        (307, "redirected"),
        (204, "not_streamed"),
    ],
)
def test_a_status_other_than_200_has_one_outcome(status: int, outcome: str) -> None:
    assert outcome_of_status(status) == outcome


@given(st.lists(st.integers(-10, 50), min_size=1, max_size=40))
def test_case_41_stamps_that_step_back_make_no_negative_number(steps_ms: list[int]) -> None:
    """A kernel stamp may be too early by as long as the process slept between reading its two clocks."""
    at_ms, instants = 0, []
    for step in steps_ms:
        at_ms += step
        instants.append(at_ms)
    made = timeline(*instants)
    made.token_reads = 99
    assert made.ttft_ns is not None
    assert made.ttft_ns >= 0
    assert all(gap >= 0 for gap in gaps_ms(made))
    assert made.e2el_ns == max([0, *instants]) * MS
    assert all(tpot >= 0 for tpot in made.tpots_ns())


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40))
def test_bundled_tokens_are_what_exact_counts_say_beyond_one_per_event_and_never_shrink(grown: list[int]) -> None:
    counts, expected, most = [], [], 0
    for events, step in enumerate(grown, 1):
        counts.append(step + (counts[-1] if counts else 0))
        if max(counts) - events > most:
            expected.append((SENT + events * MS, max(counts) - events - most))
            most = max(counts) - events
    made = timeline(*range(1, len(grown) + 1), counts=tuple(counts))
    assert made.bundles == expected
    assert made.bundled == most


@given(st.lists(st.integers(0, 10**10), min_size=2, max_size=40).map(sorted))
def test_gaps_are_the_differences_of_the_token_times(times: list[int]) -> None:
    made = timeline(*(at / MS for at in times), outcome=None)
    made.token_reads = 99
    assert made.gaps_ns().tolist() == [b - a for a, b in pairwise(times)]


def test_every_metric_has_a_unit_and_a_title_under_its_own_name() -> None:
    assert all(name == metric.name and metric.title for name, metric in METRICS.items())
    tokens = {name for name, metric in METRICS.items() if metric.unit == "tokens"}
    assert tokens == {"input_tokens", "output_tokens", "cached_tokens"}
