"""Flat tables: what a spreadsheet reads is what was measured, and no text is a formula."""

import csv
import io
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from windowed import Traffic, log_normal

from vllm_locust import picture, sheet
from vllm_locust.fidelity import DEFAULTS
from vllm_locust.summary import Meta, summary

RECORDING = log_normal(1, {"short": Traffic(40), "=cmd|' /C calc'!A0": Traffic(10)}, 3)


def read(table: sheet.Table) -> list[dict[str, str]]:
    return [*csv.DictReader(io.StringIO("".join(sheet.lines(table)), newline=""))]


def test_each_scenario_has_a_row_and_all_of_them_the_last_one() -> None:
    told = summary(RECORDING, Meta(parts=["short"]))
    rows = read(sheet.scenarios(told))
    assert [row["scenario"] for row in rows] == ["short", "'=cmd|' /C calc'!A0", ""]
    for row, scope in zip(rows, (*told["scenarios"].values(), told["total"]), strict=True):
        assert int(row["requests"]) == scope["requests"]
        assert float(row["ttft_p95_s"]) == scope["ttft"]["p95"]
        assert float(row["input_tokens_mean"]) == scope["input_tokens"]["mean"]
        assert (row["ttfc_count"], row["ttfc_p50_s"]) == ("0", "")


def test_each_window_has_a_row_per_scenario_and_one_for_all() -> None:
    columns = [*picture.columns(RECORDING, DEFAULTS, every=1, first=0, closed=3)]
    rows = read(sheet.windows(columns))
    assert len(rows) == 9
    everything = [row for row in rows if not row["scenario"]]
    assert [float(row["start_s"]) for row in everything] == [0, 10, 20]
    assert [int(row["ok"]) for row in everything] == [column["scopes"][""]["outcomes"]["ok"] for column in columns]
    assert [float(row["ttft_p99_s"]) for row in everything] == [c["scopes"][""]["ttft"]["p99"] for c in columns]


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1, max_size=5)
)
def test_no_text_is_a_formula_and_each_is_one_cell(texts: list[str]) -> None:
    rows: list[list[Any]] = [*csv.reader(io.StringIO("".join(sheet.lines([texts])), newline=""))]
    if texts == [""]:
        assert rows in ([[""]], [[]])
        return
    (row,) = rows
    assert len(row) == len(texts)
    for cell, text in zip(row, texts, strict=True):
        assert cell.removeprefix("'") == text.removeprefix("'")
        assert not cell.startswith(("=", "+", "-", "@", "\t", "\r"))


def test_numbers_are_numbers_even_below_zero_and_nothing_is_an_empty_cell() -> None:
    assert "".join(sheet.lines([[-1.5, None, True, "-1"]])) == "-1.5,,True,'-1\r\n"
    assert "".join(sheet.lines(sheet.records([]))) == ""
