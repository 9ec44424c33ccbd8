"""Our options in Locust's command line, in its web form where they make sense there, and as environment variables."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from vllm_locust.limit import SEPARATOR

GROUP = "vllm-locust options"
"""Title of our options in Locust's help."""
_STOP_TIMEOUT_S = 60
"""A stream that runs when the test ends may take as long as answers take; Locust's own default would cut it."""


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

    def option(flag: str, *, form: bool = False, default: Any = None, **kwargs: Any) -> None:  # noqa: ANN401
        name = flag.removeprefix("--").replace("-", "_")
        action = group.add_argument(flag, default=default, env_var=f"VLLM_LOCUST_{name.upper()}", **kwargs)
        # Locust sets these on options that are added to the parser itself, not on those of a group.
        action.include_in_web_ui, action.is_secret, action.is_required, action.is_multiple = form, False, False, False

    option("--scenario", form=True, help="Scenario to send instead of the user classes' own: a packaged name or a file")
    option("--parts", form=True, help="Parts of the scenario to send, separated by commas; default: all")
    option("--model", form=True, help="Model to ask for; default: the one that /v1/models names")
    option("--api-key", metavar="KEY", help="Key of the server, also from OPENAI_API_KEY; never shown or saved")
    option("--seed", form=True, default="0", help="Which requests are sent in which order; default: 0")
    option("--name", form=True, default="run", help="Name of the run, for its directory in --results; default: run")
    option("--results", default="results", metavar="DIR", help="Where runs are saved; default: results")
    option("--window", default="10s", help="Length of the windows that live figures are about; default: 10s")
    what = "Ask each event how many tokens it carries"
    how = "by the usage so far (continuous_usage_stats)"
    option("--continuous-usage", default=False, action="store_true", help=f"{what}, {how}")
    option("--token-ids", default=False, action="store_true", help=f"{what}, by their ids (return_token_ids)")
    option("--connection", default="keep-alive", help="keep-alive, or new: a new connection for each request")
    option("--insecure", default=False, action="store_true", help="Do not check the server's certificate")
    option("--ca-file", metavar="FILE", help="Certificate authority of the server, as a PEM file")
    what = "Log every request in a file beside the run: jsonl, as it is without a value, or csv"
    option("--request-log", nargs="?", const="jsonl", metavar="FORMAT", help=what)
    what = "Have prompts and answers in the log of requests, too"
    option("--log-text", default=False, action="store_true", help=what)
    option("--skip-bad-prompts", default=False, action="store_true", help="Leave unusable lines of prompt files out")
    option("--connect-timeout", default="10s", help="How long to wait for a connection; default: 10s")
    what = "How long to wait for the first token, from when the request left, or none"
    option("--first-token-timeout", default="300s", help=f"{what}; default: 300s, since a queued request may wait long")
    what = "How long a stream that has begun may send nothing at all, or none"
    option("--idle-timeout", default="120s", help=f"{what}; default: 120s")
    what = "How long a stream that has begun may send no token, whatever else it sends"
    option("--token-timeout", default="none", help=f"{what}; default: none")
    what = "How long a request may take in all, from when it left"
    option("--total-timeout", default="none", help=f"{what}; default: none")
    option("--finish-timeout", default="10s", help="How long to wait for workers after --stop-timeout; default: 10s")
    option("--prometheus-port", default="9646", metavar="PORT", help="Port of the metrics, 0 for none; default: 9646")
    _add_limits(option)
    option("--full", default=False, action="store_true", help="End with the long report: a table for each metric")
    parser.set_defaults(stop_timeout=_STOP_TIMEOUT_S)


def _add_limits(option: Callable[..., None]) -> None:
    """Add what a run is judged by: the generator first."""
    what = "Most that 1 percent of the token times may be uncertain by, of the median gap"
    option("--max-uncertainty", metavar="SHARE", help=f"{what}; default: 5%%")
    what = "Most of a core that a worker may use in any window"
    option("--max-generator-cpu", metavar="SHARE", help=f"{what}; default: 90%%")
    what = "Most of the time for which a worker needs a core that it may wait for one"
    option("--max-core-wait", metavar="SHARE", help=f"{what}; default: 20%%")
    what = "Most of the time that a worker's event loop may stall"
    option("--max-stalled", metavar="SHARE", help=f"{what}; default: 1%%")
    what = 'What the run has to meet, like "short: ttft p95 < 300ms"; repeatable'
    option("--limit", form=True, action=_Gathered, metavar="LIMIT", help=f"{what}, or several separated by ;")
    what = 'What a good request has to meet, like "ttft < 300ms, tpot < 50ms", of a part like "long: ttft < 2s"'
    option("--goodput", action=_Gathered, metavar="LIMITS", help=f"{what}; repeatable")
