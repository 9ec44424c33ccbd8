"""Our options in Locust's command line, in its web form where they make sense there, and as environment variables."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_locust.limit import SEPARATOR

GROUP = "vllm-locust options"
"""Title of our options in Locust's help."""
_STOP_TIMEOUT_S = 60
"""A stream that runs when the test ends may take as long as answers take; Locust's own default would cut it."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option."""

    flag: str
    help: str
    default: str | None = None
    form: bool = False
    """Whether it is a field of the web form."""
    metavar: str | None = None
    alias: str | None = None
    """How `vllm bench serve` calls it."""
    switch: bool = False
    """Whether it takes no value."""
    const: str | None = None
    """What it is where it is given without a value."""
    repeatable: bool = False


OPTIONS = (
    Option("--scenario", "Scenario to send instead of the user classes' own: a packaged name or a file", form=True),
    Option("--parts", "Parts of the scenario to send, separated by commas; default: all", form=True),
    Option("--model", "Model to ask for; default: the one that /v1/models names", form=True),
    Option("--api-key", "Key of the server, also from OPENAI_API_KEY; never shown or saved", metavar="KEY"),
    Option("--seed", "Which requests are sent in which order; default: 0", default="0", form=True),
    Option("--name", "Name of the run, for its directory in --results; default: run", default="run", form=True),
    Option("--note", "What to remember of the run, saved with it", form=True, metavar="TEXT"),
    Option(
        "--server-config",
        "How the server was started: a file with its command or settings, saved with the run",
        metavar="FILE",
    ),
    Option("--results", "Where runs are saved; default: results", default="results", metavar="DIR"),
    Option("--saved-path", "File that gets the path of the saved run.json, for scripts", metavar="FILE"),
    Option(
        "--request-rate",
        "Requests per second, like 20, or 5 for 60s, to 50 over 2m; default: users ask again once answered",
        form=True,
        metavar="RATE",
    ),
    Option(
        "--arrivals",
        "How requests leave at that rate: constant, poisson, gamma or trace; default: poisson",
        form=True,
        metavar="PROCESS",
    ),
    Option(
        "--burstiness",
        "Shape of gamma arrivals, as in vllm bench serve: 1 is Poisson, below 1 burstier",
        form=True,
        metavar="SHAPE",
    ),
    Option(
        "--trace",
        'Requests leave when a file of JSON lines says: {"at_s": 1.5}, or {"timestamp": 1500} in ms',
        metavar="FILE",
    ),
    Option("--trace-speed", "How much faster than its trace the run is; default: 1", metavar="FACTOR"),
    Option(
        "--max-in-flight",
        "At a request rate: most streams at once over all workers, others wait in queue; default: no cap",
        form=True,
        metavar="N",
        alias="--max-concurrency",
    ),
    Option(
        "--requests",
        "End the run when so many requests have ended, the same ones for the same seed",
        form=True,
        metavar="N",
        alias="--num-prompts",
    ),
    Option(
        "--retry-failed",
        "With a fixed number of requests: how often to ask again, at the end, what failed; default: 0",
        metavar="N",
    ),
    Option(
        "--warmup",
        "How long requests are left out at first; default: until each user has an answer, a tenth of -t at most",
        form=True,
        metavar="TIME",
    ),
    Option(
        "--stages",
        "Users, or requests per second with --request-rate, of one stage after the other, like 8,16,32",
        form=True,
        metavar="N,N,…",
    ),
    Option("--stage-time", "How long each stage takes; default: 60s", form=True, metavar="TIME"),
    Option(
        "--window",
        "Length of the windows of live figures, of the verdict on stability and of comparisons; "
        "default: a thirtieth of -t, at least 1s and at most 10s",
        metavar="TIME",
    ),
    Option(
        "--continuous-usage",
        "Ask each event how many tokens it carries, by the usage so far (continuous_usage_stats)",
        switch=True,
    ),
    Option("--token-ids", "Ask each event how many tokens it carries, by their ids (return_token_ids)", switch=True),
    Option("--connection", "keep-alive, or new: a new connection for each request", default="keep-alive"),
    Option("--insecure", "Do not check the server's certificate", switch=True),
    Option("--ca-file", "Certificate authority of the server, as a PEM file", metavar="FILE"),
    Option(
        "--request-log",
        "Log every request in a file beside the run: jsonl, as it is without a value, or csv",
        metavar="FORMAT",
        const="jsonl",
    ),
    Option("--log-text", "Have prompts and answers in the log of requests, too", switch=True),
    Option(
        "--save-samples",
        "Save so many prompts and answers of each scenario beside the run, the same ones for the same seed",
        metavar="K",
    ),
    Option("--skip-bad-prompts", "Leave unusable lines of prompt files out", switch=True),
    Option("--connect-timeout", "How long to wait for a connection; default: 10s", default="10s"),
    Option(
        "--first-token-timeout",
        "How long to wait for the first token, from when the request left, or none; default: "
        "300s, since a queued request may wait long",
        default="300s",
    ),
    Option(
        "--idle-timeout",
        "How long a stream that has begun may send nothing at all, or none; default: 120s",
        default="120s",
    ),
    Option(
        "--token-timeout",
        "How long a stream that has begun may send no token, whatever else it sends; default: none",
        default="none",
    ),
    Option("--total-timeout", "How long a request may take in all, from when it left; default: none", default="none"),
    Option("--finish-timeout", "How long to wait for workers after --stop-timeout; default: 10s", default="10s"),
    Option("--prometheus-port", "Port of the metrics, 0 for none; default: 9646", default="9646", metavar="PORT"),
    Option(
        "--max-uncertainty",
        "Most that 1 percent of the token times may be uncertain by, of the median gap; default: 5%%",
        metavar="SHARE",
    ),
    Option("--max-generator-cpu", "Most of a core that a worker may use in any 10 s; default: 90%%", metavar="SHARE"),
    Option(
        "--max-core-wait",
        "Most of the time for which a worker needs a core that it may wait for one; default: 20%%",
        metavar="SHARE",
    ),
    Option("--max-stalled", "Most of the time that a worker's event loop may stall; default: 1%%", metavar="SHARE"),
    Option(
        "--limit",
        'What the run has to meet, like "short: ttft p95 < 300ms"; repeatable, or several separated by ;',
        form=True,
        metavar="LIMIT",
        repeatable=True,
    ),
    Option(
        "--goodput",
        'What a good request meets, like "ttft < 300ms, tpot < 50ms", of a part "long: ttft < 2s"; repeatable',
        form=True,
        metavar="LIMITS",
        repeatable=True,
    ),
    Option(
        "--stability",
        "Judge the run as a stability test: stable, unstable or inconclusive, window by window",
        switch=True,
        form=True,
    ),
    Option("--html-report", "Save a report with charts, too: report.html beside the run", switch=True),
    Option("--full", "End with the long report: a table for each metric", switch=True),
)


class _Gathered(argparse._AppendAction):  # noqa: SLF001 - what makes ConfigArgParse take a list from a file
    """Gathers an option that is repeated in one text.

    Locust's web form splits the values of a list at commas, which quantities have.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 - argparse's signature
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        gathered = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, f"{gathered}{SEPARATOR} {values}" if gathered else values)


def add_options(parser: Any, **_: Any) -> None:  # noqa: ANN401 - a locust parser
    """Add our options to Locust's command line and, where they make sense, to its web form."""
    group = parser.add_argument_group(
        GROUP, "Each is an environment variable, too: VLLM_LOCUST_SCENARIO is --scenario, and so on."
    )
    for option in OPTIONS:
        _add(group, option)
    parser.set_defaults(stop_timeout=_STOP_TIMEOUT_S)


def _add(group: Any, option: Option) -> None:  # noqa: ANN401 - an argparse group
    name = option.flag.removeprefix("--").replace("-", "_")
    kind: dict[str, Any] = {"metavar": option.metavar, "default": option.default}
    if option.switch:
        kind = {"action": "store_true", "default": False}
    elif option.const is not None:
        kind |= {"nargs": "?", "const": option.const}
    elif option.repeatable:
        kind |= {"action": _Gathered}
    flags = [option.flag, *filter(None, [option.alias])]
    action = group.add_argument(*flags, env_var=f"VLLM_LOCUST_{name.upper()}", help=option.help, **kind)
    # Locust sets these on options that are added to the parser itself, not on those of a group.
    action.include_in_web_ui, action.is_secret, action.is_required, action.is_multiple = (
        option.form,
        False,
        False,
        False,
    )
