"""Options that are gathered from several places."""

import os

import configargparse
import pytest

from vllm_locust.limit import parse, split
from vllm_locust.options import OPTIONS, Option, add_options

LONGEST_LABEL = 115
"""In characters, of a field that is filled in; Locust cuts longer ones off."""
LIMITS = ["ttft p95 < 1,200ms", "failures < 1%"]


def limits_of(*args: str, config: str = "", **env: str) -> list[str]:
    parser = configargparse.ArgumentParser(config_file_parser_class=configargparse.DefaultConfigFileParser)
    add_options(parser)
    options = parser.parse_args(list(args), env_vars=os.environ | env, config_file_contents=config)
    assert options.limit is None or isinstance(options.limit, str)  # a web form splits lists at commas
    return [str(parse(text)) for text in split(options.limit)]


@pytest.mark.parametrize(
    "args",
    [
        ["--limit", LIMITS[0], "--limit", LIMITS[1]],
        [f"--limit={LIMITS[0]};{LIMITS[1]}"],
    ],
)
def test_an_option_may_be_repeated_or_hold_several_limits(args: list[str]) -> None:
    assert limits_of(*args) == ["ttft p95 < 1.2s", "failures < 1%"]


def test_limits_may_come_from_a_variable_or_a_file_and_the_command_line_goes_first() -> None:
    assert limits_of(VLLM_LOCUST_LIMIT="; ".join(LIMITS)) == ["ttft p95 < 1.2s", "failures < 1%"]
    assert limits_of(config='limit = ["ttft p95 < 1s", "failures < 2%"]') == ["ttft p95 < 1s", "failures < 2%"]
    assert limits_of("--limit", LIMITS[1], VLLM_LOCUST_LIMIT=LIMITS[0]) == ["failures < 1%"]
    assert limits_of() == []


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.form], ids=lambda option: str(option.flag))
def test_help_fits_a_field_of_the_web_form(option: Option) -> None:
    assert len(f"{option.flag[2:]} ({option.help})") <= LONGEST_LABEL
