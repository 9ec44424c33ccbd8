"""Answers side by side: which ones got shorter, stopped for another reason, failed, and which say nothing of that."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import MIXED, assert_clean, headless, locust, process, simulator
from test_samples import example

from vllm_locust.pairs import HEADS, Pair, SideBySide, asked, changed, lines, rows, said, side_by_side, summary
from vllm_locust.samples import Sample, load
from vllm_locust.terminal import COLUMNS, width_of


def of(sample: Sample, **changes: Any) -> Sample:
    return msgspec.structs.replace(sample, **changes)


BASE = example(output_tokens=5, answer="It is so, and so.")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"ttft_s": 9.0, "request_id": "other", "worker": "w"}, []),
        ({"answer": "It is thus, and so."}, ["another text"]),
        ({"reasoning": "Hm."}, ["another text"]),
        ({"answer": None, "reasoning": "It is so, and so."}, ["another text"]),
        ({"answer": "It is", "output_tokens": 2}, ["shorter"]),
        ({"answer": "It is", "output_tokens": 2, "finish_reason": "length"}, ["stopped for another reason", "shorter"]),
        ({"finish_reason": None}, ["stopped for another reason"]),
        ({"answer": "It is so, and so it is.", "output_tokens": 7}, ["longer"]),
        ({"output_tokens": 4}, ["shorter"]),
        ({"outcome": "truncated", "output_tokens": 2, "finish_reason": None}, ["failed"]),
        # The number of events is no length.
        ({"output_tokens": 2, "estimated": True}, []),
        ({"output_tokens": 9, "estimated": True, "answer": "It is so."}, ["shorter"]),
    ],
)
def test_what_is_different_has_words(changes: dict[str, Any], words: list[str]) -> None:
    pair = Pair(BASE, of(BASE, **changes))
    assert pair.words == words
    assert pair.equal == (not words)


def test_what_failed_before_is_told_apart() -> None:
    failed = of(BASE, outcome="http_5xx", answer=None, output_tokens=0, finish_reason=None)
    assert Pair(failed, BASE).words == ["no longer failed"]
    assert Pair(failed, of(failed, message="another")).words == []
    assert Pair(failed, of(failed, outcome="truncated")).words == ["failed otherwise"]
    assert not Pair(failed, failed).equal
    found = SideBySide(pairs=(Pair(failed, BASE), Pair(BASE, failed), Pair(failed, failed)))
    assert (found.failed, found.mended, found.equal, found.shorter) == (1, 1, 0, 0)


def test_only_the_same_request_with_the_same_prompt_has_a_twin_and_what_was_cut_is_left_out() -> None:
    places = {name: f"{number:016x}" for number, name in enumerate(("same", "prompt", "base", "new", "cut", "text"))}
    base = [example(rank=places[name], index=i) for i, name in enumerate(("same", "prompt", "base", "cut", "text"))]
    new = [of(one) for one in base if one.rank != places["base"]]
    new = [
        of(one, prompt="Other?")
        if one.rank == places["prompt"]
        else of(one, outcome="cancelled")
        if one.rank == places["cut"]
        else of(one, answer="No.", output_tokens=2)
        if one.rank == places["text"]
        else one
        for one in new
    ]
    found = side_by_side(
        base, [*reversed(new), example(rank=places["new"]), example(rank=places["same"], scenario="b")]
    )
    assert [(pair.base.index, pair.words) for pair in found.pairs] == [(0, []), (4, ["shorter"])]
    assert (found.cut, found.other_prompt, found.base_alone, found.new_alone) == (1, 1, 1, 2)
    assert summary(found) == (
        "answers to 2 prompts beside each other: 1 equal, 1 shorter; left out: 1 cut by the end of a run, "
        "1 asked something else, 1 in the base alone, 2 in the new alone"
    )


def test_of_several_runs_a_side_the_first_is_beside_the_first() -> None:
    texts = [f"answer {i}" for i in range(3)]
    base = [example(answer=text) for text in texts]
    found = side_by_side(base, [example(answer=text) for text in (texts[0], "another", texts[2])][:2])
    assert [pair.equal for pair in found.pairs] == [True, False]
    assert found.base_alone == 1


SAMPLES = st.lists(
    st.builds(
        lambda place, prompt, outcome, tokens, reason, text: example(
            rank=f"{place:016x}",
            prompt=prompt,
            outcome=outcome,
            output_tokens=tokens,
            finish_reason=reason,
            answer=text,
        ),
        st.integers(0, 9),
        st.sampled_from(["Why?", "Where?"]),
        st.sampled_from(["ok", "ok", "ok", "cancelled", "truncated"]),
        st.integers(0, 3),
        st.sampled_from(["stop", "length"]),
        st.none() | st.text(max_size=9) | st.lists(st.text(max_size=3), max_size=2),
    ),
    max_size=12,
    unique_by=lambda sample: sample.rank,
)


@given(SAMPLES, SAMPLES, st.randoms())
def test_every_sample_is_counted_once_and_the_order_of_files_does_not_matter(
    base: list[Sample], new: list[Sample], order: random.Random
) -> None:
    found = side_by_side(base, new)
    both = len(found.pairs) + found.cut + found.other_prompt
    assert (both + found.base_alone, both + found.new_alone) == (len(base), len(new))
    turned = side_by_side(new, base)
    assert (turned.failed, turned.shorter, turned.longer) == (found.mended, found.longer, found.shorter)
    assert (turned.equal, turned.other_reason) == (found.equal, found.other_reason)
    order.shuffle(base)
    order.shuffle(new)
    assert side_by_side(base, new) == found
    assert side_by_side(base, base).equal == sum(sample.outcome == "ok" for sample in base)
    assert len(changed(found)) == sum(bool(pair.words) for pair in found.pairs)


# For people


def test_a_terminal_shows_the_worst_pairs_around_their_first_difference() -> None:
    told = " ".join(f"word{i}" for i in range(100))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why\nso?"}]
    base = [example(rank=f"{i:016x}", index=i, prompt=messages, answer=told, output_tokens=100) for i in range(6)]
    new = [
        of(base[0], answer=told.replace("word50", "WORD50")),
        of(base[1], answer=told[:300], output_tokens=50, finish_reason="length"),
        of(base[2], outcome="stream_error", message="out of memory", answer=told[:3], output_tokens=1),
        of(base[3], answer=f"{told} more", output_tokens=101),
        base[4],
        of(base[5], answer=told.replace(" word1 ", "\nword1 ")),
    ]
    found = side_by_side(base, new)
    assert lines(found) == [
        "Samples   answers to 6 prompts beside each other: 1 equal, 1 shorter, 1 longer, 1 stopped for",
        "          another reason, 1 failed",
        "  short, Mine 2: failed",
        "    asked  Why so?",
        "    base   100 tokens, stop: word0 word1 word2 word3 word4 word5 word6 word7 word8 word9 word10 wor…",
        "    new    1 token, stream_error (out of memory): wor",
        "  short, Mine 1: stopped for another reason, shorter",
        "    asked  Why so?",
        "    base   100 tokens, stop: …word40 word41 word42 word43 word44 word45 word46 word47 word48 word49…",
        "    new    50 tokens, length: …word40 word41 word42 word43 wo",
        "  short, Mine 0: another text",
        "    asked  Why so?",
        "    base   100 tokens, stop: …5 word46 word47 word48 word49 word50 word51 word52 word53 word54 word…",
        "    new    100 tokens, stop: …5 word46 word47 word48 word49 WORD50 word51 word52 word53 word54 word…",
        "  and 2 more",
    ]
    shown = lines(found, most=9)
    assert len(shown) == 2 + 5 * 4
    (turned,) = [line for line in shown if "⏎" in line and line.startswith("    new")]
    assert "word0⏎word1" in turned
    assert len(rows(found)) == 5
    assert len(rows(found, most=2)) == 2
    assert rows(found)[1][:4] == ["short", "Mine 1", "stopped for another reason, shorter", "Why so?"]
    assert all(len(row) == len(HEADS) for row in rows(found))


def test_without_samples_nothing_is_said() -> None:
    assert lines(side_by_side([], [])) == []
    assert lines(side_by_side([example()], [])) == [
        "Samples   no prompt is on both sides; left out: 1 in the base alone"
    ]


HOSTILE = st.text(st.sampled_from("\x1b[31m\x07\u202e\u0301漢\n\t\r\x9b a\U0001f600"), max_size=300)


@given(HOSTILE, HOSTILE, HOSTILE)
def test_nothing_that_a_server_says_is_obeyed_or_wider_than_a_line(one: str, other: str, name: str) -> None:
    base = example(answer=one, prompt=[{"role": "user", "content": name}], scenario=name, user_class=name)
    new = of(base, answer=other, outcome="truncated", message=name, finish_reason=None)
    found = side_by_side([base, example(rank="f")], [new, example(rank="f", answer=one, finish_reason=name)])
    for line in lines(found):
        assert line.isprintable()
        assert width_of(line) <= COLUMNS
    assert all(cell.isprintable() for row in rows(found) for cell in row)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("Why?", "Why?"),
        ([{"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image_url"}]}], "See …"),
        ([{"role": "assistant", "content": None}], ""),
        ([1, 2], "[1, 2]"),
        ([], "[]"),
        (None, "None"),
    ],
)
def test_what_was_asked_is_a_text_whatever_the_prompt(prompt: Any, text: str) -> None:
    assert asked(prompt) == text


def test_all_that_was_said_is_one_text() -> None:
    assert said(example(answer=["a", "b"], reasoning="Hm.")) == "Hm.\na\nb"
    assert said(example(answer=None)) == ""


# Real runs


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with simulator(tmp_path, "--ttft", "10ms", "--itl", "1ms") as url:
        yield url


def run(folder: Path, name: str, url: str, longest: int) -> list[Sample]:
    """Run one user, since the simulator answers by the order of requests; return the samples."""
    (folder / "p.jsonl").write_text("".join(f'{{"prompt": "Question {i}?"}}\n' for i in range(20)))
    path = folder / f"{name}.toml"
    path.write_text(f'[part.a]\nprompts = "p.jsonl"\nmax_tokens = {longest}\n')
    arguments = headless(folder, url, "-u", "1", "--requests", "30", "--name", name, "--save-samples", "10")
    command = locust(*arguments, "--scenario", str(path), "MixedChat", locustfile=MIXED)
    with process(command, folder / f"{name}.log", cwd=folder) as running:
        assert running.wait() in (0, 3)
        assert_clean(running)
    (found,) = (folder / "results").glob(f"{name}_*")
    return load(found)


def test_a_server_that_cuts_answers_is_seen_and_the_same_one_is_not(tmp_path: Path, server: str) -> None:
    base = run(tmp_path, "base", server, 200)
    with simulator(tmp_path, "--ttft", "10ms", "--itl", "1ms") as again:
        same = side_by_side(base, run(tmp_path, "same", again, 200))
    assert (len(same.pairs), same.equal) == (10, 10)
    assert len(lines(same)) == 1
    with simulator(tmp_path, "--ttft", "10ms", "--itl", "1ms") as again:
        tuned = side_by_side(base, run(tmp_path, "tuned", again, 60))
    longer = [sample for sample in base if sample.output_tokens > 60]
    assert len(longer) > 3
    assert (len(tuned.pairs), tuned.shorter, tuned.longer, tuned.failed) == (10, len(longer), 0, 0)
    assert tuned.other_reason == sum(sample.finish_reason == "stop" for sample in longer)
    assert all(said(pair.base).startswith(said(pair.new)) for pair in tuned.pairs)
    with simulator(tmp_path, "--ttft", "10ms", "--itl", "1ms", "--early-ends", "0.4") as broken:
        failing = side_by_side(base, run(tmp_path, "failing", broken, 200))
    ended = sum(pair.new.outcome == "truncated" for pair in failing.pairs)
    assert failing.failed == ended > 0
    assert failing.equal == 10 - ended
    assert all(pair.new.output_tokens == 3 for pair in failing.pairs if pair.failed)
