"""Run files as older versions really wrote them: each is read for ever (what they said then is in test_run_file)."""

import json
from pathlib import Path

import pytest

from vllm_locust import page
from vllm_locust.excerpt import excerpt
from vllm_locust.histogram import Histogram
from vllm_locust.markdown import text as markdown
from vllm_locust.older import upgraded
from vllm_locust.report import text
from vllm_locust.results import load

FILES = sorted((Path(__file__).parent / "golden" / "runs").glob("*.json"))


def test_there_is_a_file_from_before_each_change() -> None:
    """Counts as lists; then no slowest requests; no warm-up; no limits; no command; no note."""
    keys = [{*(run := json.loads(file.read_text()))["meta"], *run["recording"]} for file in FILES]
    added = ("window_ns", "generator_limits", "slowest", "boundaries_ns", "limits", "command", "note")
    assert len(FILES) == len(added) - 1
    for number, since in enumerate(keys):
        assert added[number] in since
        assert added[number + 1] not in since


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_report_can_be_made_of_it(file: Path) -> None:
    run = load(file)
    requests = f"{run.summary['total']['requests']:,}"
    for shown in (text(run), text(run, full=True), markdown(run), page.of_run(run), text(excerpt(run, since_s=1))):
        assert run.meta.run in shown
    assert requests in text(run)


def test_counts_as_lists_are_the_same_histogram() -> None:
    """As a file of the first version has it: steps from bucket to bucket, of which -1 is zero, and counts."""
    values = [0, 0, 1, 1, 7, 80_000_000, 80_100_000, 10**12]
    expected = Histogram()
    for value in values:
        expected.add(value)
    buckets: dict[int, int] = {}
    for value, first in ((value, Histogram()) for value in values):
        first.add(value)
        bucket = first.first if value else -1
        buckets[bucket] = buckets.get(bucket, 0) + 1
    ranked = sorted(buckets.items())
    steps = [bucket - before for before, (bucket, _) in zip([0, *(b for b, _ in ranked)], ranked, strict=False)]
    saved = [steps, [count for _, count in ranked], sum(values), 0, 10**12]
    cells = [{"key": ["a", "chat", "steady", 0], "histograms": {"itl": saved}, "counters": {}}]
    recording = upgraded({"windows": [{"index": 0, "cells": cells}]})
    found = Histogram()
    found.merge_planes(*recording["windows"][0]["cells"][0]["histograms"]["itl"])
    assert (dict(found), found.count, found.sum, found.min, found.max, found.zeros) == (
        *(dict(expected), len(values), sum(values), 0, 10**12),
        2,
    )
