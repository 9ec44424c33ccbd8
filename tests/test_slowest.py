"""The slowest requests: whatever the network does to reports, a master's lists are the slowest of all."""

from collections.abc import Iterable
from random import Random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from vllm_locust.recording import Recording, Report, decode_report, encode_report, load
from vllm_locust.slowest import SIZE, Lists, Slow, Slowest, add, admits, each

S = 1_000_000_000


def slow(scenario: str, metric: str, value_ns: int, number: int) -> Slow:
    """Return a request, all of which follows from its number."""
    return Slow(
        scenario=scenario,
        endpoint="chat",
        metric=metric,
        value_ns=value_ns,
        at_ns=number * S,
        worker=f"worker {number % 3}",
        request_id=f"5f0c1234-Chat-{number}",
        input_tokens=number if number % 2 else None,
        output_tokens=number,
        in_flight=number,
        outcome="ok",
    )


lists = st.tuples(st.sampled_from(["short", "会話"]), st.sampled_from(["ttft", "itl_max"]))
values = st.one_of(st.integers(0, 4), st.integers(0, 10**13))
"""Many of them are equal."""
requests = st.lists(st.tuples(lists, values), max_size=60).map(
    lambda drawn: [slow(*place, value, number) for number, (place, value) in enumerate(drawn)]
)


def slowest_of_all(requests: Iterable[Slow]) -> Lists:
    """Return what lists hold by their definition, from all requests there ever were."""
    found: Lists = {}
    for one in requests:
        found.setdefault((one.scenario, one.metric), []).append(one)
    return {place: sorted(all_, key=lambda s: (-s.value_ns, s.request_id))[:10] for place, all_ in found.items()}


def merged(requests: Iterable[Slow]) -> Lists:
    found: Lists = {}
    for one in requests:
        add(found, one)
    return found


@given(requests, st.randoms(use_true_random=False), st.integers(1, 4))
def test_the_ten_slowest_of_any_parts_in_any_order_and_any_number_of_times_are_those_of_all(
    requests: list[Slow], random: Random, parts: int
) -> None:
    expected = slowest_of_all(requests)
    split: list[list[Slow]] = [[] for _ in range(parts)]
    for one in requests:
        random.choice(split).append(one)
    kept = [one for part in split for one in each(merged(part))]
    again = [*kept, *random.choices(kept, k=len(kept))] if kept else []
    random.shuffle(again)
    assert merged(again) == merged(requests) == expected
    assert [*each(merged(again))] == [one for place in sorted(expected) for one in expected[place]]


@given(requests, lists, values)
def test_what_is_not_admitted_is_not_among_the_slowest(
    requests: list[Slow], place: tuple[str, str], value_ns: int
) -> None:
    one = slow(*place, value_ns, 1000)
    found = merged(requests)
    taken = one in slowest_of_all([*requests, one])[place]
    assert admits(found, *place, value_ns) or not taken


class Network:
    """A worker, a master, and reports of which each may be lost, repeated or late, as may acknowledgements."""

    def __init__(self) -> None:
        self.worker = Slowest()
        self.master = Recording("r", 0, 10 * S)
        self.seq = 0
        self.sent: list[bytes] = []
        self.delivered: list[int] = []
        self.truth: list[Slow] = []

    def end(self, one: Slow) -> None:
        self.truth.append(one)
        add(self.worker.lists, one)

    def report(self) -> list[Slow]:
        self.seq += 1
        carried = self.worker.report(self.seq)
        report = Report(run="r", epoch=0, worker="w", seq=self.seq, now_ns=0, windows=[], failures=[], slowest=carried)
        self.sent.append(encode_report(report))
        return carried

    def deliver(self, number: int) -> None:
        if self.sent:
            report = decode_report(self.sent[number % len(self.sent)])
            assert self.master.merge(report)
            self.delivered.append(report.seq)

    def acknowledge(self, number: int) -> None:
        if self.delivered:
            self.worker.acknowledge(self.delivered[number % len(self.delivered)])


steps = st.lists(
    st.one_of(
        st.tuples(st.just("end"), lists, values),
        st.tuples(st.sampled_from(["deliver", "acknowledge"]), st.integers(0, 99)),
        st.tuples(st.just("report")),
    ),
    max_size=80,
)


@given(steps)
def test_a_lost_or_late_report_loses_nothing(script: list[tuple[object, ...]]) -> None:
    network = Network()
    for number, (what, *arguments) in enumerate(script):
        if what == "end":
            place, value = arguments
            network.end(slow(*place, value, number))  # type: ignore[misc, arg-type] - as drawn
        elif what == "report":
            assert len(network.report()) <= 2 * 2 * SIZE
        else:
            getattr(network, str(what))(*arguments)
    expected = slowest_of_all(network.truth)
    network.report()
    network.deliver(-1)
    assert network.master.slowest == expected
    network.acknowledge(-1)
    assert network.report() == []


def test_what_was_acknowledged_is_not_sent_again_and_what_came_since_is() -> None:
    network = Network()
    network.end(slow("short", "ttft", 5, 1))
    assert len(network.report()) == len(network.report()) == 1
    network.deliver(0)
    network.end(slow("short", "ttft", 7, 2))
    network.acknowledge(0)
    assert [one.value_ns for one in network.report()] == [7]


def test_case_59_the_size_of_what_is_reported_is_bounded_however_many_requests_there_were() -> None:
    """Two lists of ten for each scenario: 3 KB with names as long as these, though no report was ever acknowledged."""
    network = Network()
    for number in range(20_000):
        for metric in ("ttft", "itl_max"):
            network.end(slow("a scenario of some length", metric, number * 7919 % 10**9, number))
    assert len(network.report()) == 2 * SIZE
    assert len(network.sent[0]) < 3000


def test_a_saved_recording_has_them_and_one_from_before_they_were_kept_has_none() -> None:
    network = Network()
    for number in range(30):
        network.end(slow("会話", "itl_max", number, number))
    network.report()
    network.deliver(0)
    saved = msgspec.json.decode(msgspec.json.encode(network.master.save()))
    assert load(saved).slowest == slowest_of_all(network.truth)
    del saved["slowest"]
    assert load(saved).slowest == {}
