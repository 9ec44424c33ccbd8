"""The command `vllm-locust`: everything that is no load test; a load test is `locust` itself.

Numbers go to stdout, remarks to stderr. An error of the user is one message and exit code 2, one of the server exit
code 1.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from vllm_locust import __version__, faults
from vllm_locust.errors import ExitCode, InputError
from vllm_locust.quantity import duration_s, format_list

_EPILOG = """\
examples:
  vllm-locust simulate --port 8000
  vllm-locust check --host http://localhost:8000 --scenario mixed
  locust -f locustfiles/mixed.py --host http://localhost:8000 -u 50 -r 50 -t 5m --headless
  locust -f locustfiles/mixed.py --host http://localhost:8000 --request-rate 20 -t 5m --headless
  vllm-locust report results/run_20260101-120000
  vllm-locust compare results/before_20260101-120000 results/after_20260101-130000
  vllm-locust export --format vllm-bench results/run_20260101-120000
  vllm-locust list results
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.act(options))
    except InputError as error:
        print(f"vllm-locust: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe, like `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.OK)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-locust",
        description="Measure streaming LLM servers with Locust.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vllm-locust {__version__}")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    _add_simulate(verbs)
    _add_check(verbs)
    _add_report(verbs)
    _add_compare(verbs)
    _add_gate(verbs)
    _add_export(verbs)
    _add_list(verbs)
    _add_demo(verbs)
    shown = verbs.add_parser("options", help="print the options that locust has with this plugin")
    shown.set_defaults(act=_options)
    path = verbs.add_parser("path", help="print where a packaged scenario, example locustfile or JSON schema is")
    path.add_argument("name", help="like mixed.py, mixed.toml or run.schema.json")
    path.set_defaults(act=_path)
    return parser


def _add_simulate(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    width = max(map(len, faults.EXAMPLES))
    examples = "".join(f"\n  {example:{width}}  {what}" for example, what in faults.EXAMPLES.items())
    verb = verbs.add_parser(
        "simulate",
        help="serve a simulated vLLM with known timing",
        epilog=f"faults, with times that count from the first streamed request:{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.set_defaults(act=_simulate)
    verb.add_argument("--bind", default="127.0.0.1", metavar="ADDRESS", help="address to listen on")
    verb.add_argument("--port", type=int, default=8000, help="port to listen on, 0 for a free one (default: 8000)")
    verb.add_argument("--quiet", action="store_true", help="do not say where it listens")
    verb.add_argument("--model", default="simulated", help="name of the model (default: simulated)")
    verb.add_argument("--seed", type=int, default=0, help="seed of all that is drawn (default: 0)")
    verb.add_argument("--ttft", default="80ms", help="median time to first token (default: 80ms)")
    verb.add_argument("--ttft-sigma", type=float, default=0.25, help="spread of it, log-normal (default: 0.25)")
    verb.add_argument("--itl", default="12ms", help="median gap between tokens (default: 12ms)")
    verb.add_argument("--itl-sigma", type=float, default=0.15, help="spread of it, log-normal (default: 0.15)")
    verb.add_argument("--prefill", default="40us", help="what each token of a prompt adds to TTFT (default: 40us)")
    verb.add_argument("--seats", type=int, default=64, help="requests that run at once, others queue (default: 64)")
    verb.add_argument("--max-model-len", type=int, default=32768, help="longest context (default: 32768)")
    verb.add_argument("--api-key", help="key that requests have to carry")
    verb.add_argument(
        "--stream-errors", type=float, default=0, help="share of streams that break with an error in them"
    )
    verb.add_argument("--early-ends", type=float, default=0, help="share of streams that end early without an error")
    verb.add_argument("--fault", action="append", default=[], help="how it misbehaves, as below; may be given again")
    verb.add_argument("--emission", action="store_true", help="tell in each event when it was sent")
    verb.add_argument("--chat-only", action="store_true", help="have no /v1/completions")


def _add_check(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verb = verbs.add_parser("check", help="check scenario, prompts and server, with one request per part")
    verb.set_defaults(act=_check)
    verb.add_argument("--host", required=True, help="address of the server, like http://localhost:8000")
    verb.add_argument("--scenario", default="mixed", help="packaged name or file (default: mixed)")
    verb.add_argument("--model", help="model to ask for; default: the one that /v1/models names")
    verb.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="also from OPENAI_API_KEY")
    verb.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    verb.add_argument("--ca-file", help="certificate authority of the server, as a PEM file")
    verb.add_argument("--skip-bad-prompts", action="store_true", help="leave unusable lines of prompt files out")
    verb.add_argument("--no-request", action="store_true", help="do not ask for any answer")


def _add_report(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verb = verbs.add_parser("report", help="print the report of a saved run")
    verb.set_defaults(act=_report)
    verb.add_argument("run", type=Path, help="a run.json, or the directory that it is in")
    verb.add_argument("--from", dest="since", metavar="TIME", help="leave out what happened before, like 60s")
    verb.add_argument("--to", dest="until", metavar="TIME", help="leave out what happened later, like 4m")
    verb.add_argument("--scenario", action="append", default=[], help="only the requests of this one; repeatable")
    shape = verb.add_mutually_exclusive_group()
    shape.add_argument("--full", action="store_true", help="add a table for each metric")
    shape.add_argument("--format", choices=("text", "markdown"), default="text", help="default: text")
    shape.add_argument("--html", type=Path, metavar="FILE", help="write a web page with charts instead")


def _add_compare(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verb = verbs.add_parser(
        "compare",
        help="say what changed from one run to another, and what is chance",
        usage="vllm-locust compare [options] BASE NEW\n       vllm-locust compare [options] --base RUN... --new RUN...",
    )
    verb.set_defaults(act=_compare)
    verb.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="a run.json, or the directory that it is in")
    verb.add_argument(
        "--base", type=Path, nargs="+", default=[], metavar="RUN", help="runs of the base, after restarts"
    )
    verb.add_argument("--new", type=Path, nargs="+", default=[], metavar="RUN", help="runs of what it is compared with")
    _add_asked(verb, "--limit")
    verb.add_argument("--force", action="store_true", help="compare what is incomparable")
    verb.add_argument("--format", choices=("text", "markdown"), default="text", help="default: text")


def _add_gate(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verb = verbs.add_parser(
        "gate",
        help="run, compare with a stored run, and say by the exit code whether that passes",
        usage="vllm-locust gate [options] -- OPTIONS OF LOCUST",
    )
    verb.set_defaults(act=_gate)
    verb.add_argument(
        "--baseline",
        type=Path,
        nargs="+",
        default=[],
        metavar="RUN",
        help="what to compare with: a run.json, or the directory that it is in; several are runs after restarts",
    )
    verb.add_argument(
        "--save-baseline",
        action="store_true",
        help="where there is no baseline yet, store this run as one if it passes",
    )
    _add_asked(verb, "--limit-difference")
    verb.add_argument(
        "--summary",
        type=Path,
        default=os.environ.get("GITHUB_STEP_SUMMARY") or None,
        metavar="FILE",
        help="add what came out to it, as Markdown (default: $GITHUB_STEP_SUMMARY)",
    )
    verb.add_argument("locust", nargs="*", metavar="OPTIONS", help="options of locust, after --")


def _add_asked(verb: argparse.ArgumentParser, limit: str) -> None:
    """Add what may be asked of a comparison; where a run has limits of its own, theirs has another flag."""
    verb.add_argument(
        limit,
        action="append",
        default=[],
        metavar="LIMIT",
        help='how much worse a figure may be, like "ttft p95 +5%%" or "short: ttft p50 +10ms"; may be repeated',
    )
    verb.add_argument(
        "--rule", choices=("tuned",), help="tuned: p95 TTFT has to be clearly lower, and mean ITL not clearly higher"
    )
    verb.add_argument("--html", type=Path, metavar="FILE", help="write a web page of the comparison with charts, too")


def _add_export(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verb = verbs.add_parser("export", help="write the numbers of a run as other tools read them")
    verb.set_defaults(act=_export)
    verb.add_argument("run", type=Path, help="a run.json, or the directory that it is in")
    verb.add_argument(
        "--format",
        choices=("vllm-bench", "csv"),
        required=True,
        help="vllm-bench: result files of vllm bench serve; csv: a table with a row for each scenario",
    )
    verb.add_argument(
        "--output",
        type=Path,
        metavar="PATH",
        help="directory for vllm-bench (default: vllm-bench, beside the run), file for csv (default: print it)",
    )


def _add_list(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verb = verbs.add_parser("list", help="print a table of the runs in a directory")
    verb.set_defaults(act=_list)
    verb.add_argument("directory", type=Path, nargs="?", default=Path("results"), help="default: results")


def _add_demo(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verb = verbs.add_parser("demo", help="measure the simulator, or a server, with a master and two workers")
    verb.set_defaults(act=_demo)
    verb.add_argument("--host", help="a server to measure instead of the simulator")
    verb.add_argument("--users", type=int, default=20, help="users (default: 20)")
    verb.add_argument("--run-time", help="how long (default: 60s, a stability test 5m)")
    verb.add_argument(
        "--stability", action="store_true", help="find a rate by stages, then test the server at three quarters of it"
    )
    verb.add_argument("--stages", default="8,16,24,32", help="rates of its stages (default: 8,16,24,32)")
    verb.add_argument("--stage-time", default="20s", help="how long each stage takes (default: 20s)")
    verb.add_argument(
        "--limit", default="ttft p95 < 500ms", help='what a stage has to meet (default: "ttft p95 < 500ms")'
    )
    verb.add_argument("--results", default="results", help="where the run is saved (default: results)")
    verb.add_argument(
        "--prometheus-port", type=int, default=9646, help="port of the metrics (default: 9646, else a free one)"
    )
    verb.add_argument("more", nargs="*", help="more options for locust, after --")


def _simulate(options: argparse.Namespace) -> int:
    from vllm_locust.simulator import Profile, Simulator  # noqa: PLC0415 - verbs load what they need alone

    given = {
        "ttft_s": duration_s(options.ttft, where="--ttft"),
        "itl_s": duration_s(options.itl, where="--itl"),
        "prefill_s_per_token": duration_s(options.prefill, where="--prefill"),
        "completions": not options.chat_only,
        "faults": tuple(map(faults.parse, options.fault)),
    }
    same = {field.name: getattr(options, field.name) for field in fields(Profile) if hasattr(options, field.name)}
    try:
        simulator = Simulator(Profile(**same | given), host=options.bind, port=options.port)
        simulator.start()
    except (ValueError, OSError) as error:
        raise InputError(f"simulate: {error}") from None
    if not options.quiet:
        print(f"simulated vLLM, model {options.model}, at {simulator.url} (Ctrl-C ends it)", flush=True)
    simulator.serve_forever()
    return ExitCode.OK


def _check(options: argparse.Namespace) -> int:
    from vllm_locust.check import check  # noqa: PLC0415 - verbs load what they need alone

    return check(options)


def _report(options: argparse.Namespace) -> int:
    from vllm_locust import excerpt, markdown, page, report, results, samples  # noqa: PLC0415 - verbs load what they need alone

    run = results.load(options.run)
    since, until = (
        None if text is None else duration_s(text, where=flag)
        for flag, text in (("--from", options.since), ("--to", options.until))
    )
    if options.scenario or since is not None or until is not None:
        run = excerpt.excerpt(run, since_s=since, until_s=until, scenarios=options.scenario)
    if options.html is not None:
        results.save_text(page.of_run(run), options.html)
    elif options.format == "markdown":
        print(markdown.text(run), end="")
    else:
        print(report.text(run, full=options.full), end="")
        if kept := samples.line(options.run):
            print(f"{'Samples':10}{kept}")
    return ExitCode.OK


def _compare(options: argparse.Namespace) -> int:
    # Verbs load what they need alone.
    from vllm_locust import allowance, compare, comparison, page, pairs, results  # noqa: PLC0415

    base, new = options.base, options.new
    if options.runs:
        if len(options.runs) != 2 or base or new:  # noqa: PLR2004 - two sides
            raise InputError("compare: give two runs, BASE NEW, or several a side: --base RUN... --new RUN...")
        base, new = options.runs[:1], options.runs[1:]
    if not base or not new:
        raise InputError("compare: a side has no run; give BASE NEW, or --base RUN... --new RUN...")
    found = comparison.compare(
        [*map(results.load, base)],
        [*map(results.load, new)],
        allowances=[allowance.parse(text) for text in options.limit],
        tuned=options.rule is not None,
        force=options.force,
        samples=pairs.of_runs(base, new),
    )
    if options.html is not None:
        results.save_text(page.of_comparison(found), options.html)
    print(compare.as_markdown(found) if options.format == "markdown" else compare.text(found), end="")
    return found.exit_code


def _gate(options: argparse.Namespace) -> int:
    from vllm_locust import allowance, gate  # noqa: PLC0415 - verbs load what they need alone

    asked = gate.Gate(
        locust=tuple(options.locust),
        baseline=tuple(options.baseline),
        store=options.save_baseline,
        allowances=tuple(allowance.parse(text, where=gate.LIMIT) for text in options.limit_difference),
        tuned=options.rule is not None,
        summary=options.summary,
        html=options.html,
    )
    return gate.run(asked)


def _export(options: argparse.Namespace) -> int:
    from vllm_locust import results, sheet, vllm_bench  # noqa: PLC0415 - verbs load what they need alone

    run = results.load(options.run)
    if options.format == "csv":
        table = "".join(sheet.lines(sheet.scenarios(run.summary)))
        if options.output is None:
            print(table, end="")
        elif options.output.exists():
            raise InputError(f"--output {options.output}: is there already, and stays; give another file")
        else:
            results.save_text(table, options.output)
            print(options.output)
        return ExitCode.OK
    beside = options.run if options.run.is_dir() else options.run.parent
    rows = vllm_bench.log_of(beside)
    found = vllm_bench.results_of(run, rows)
    for path in vllm_bench.save(found, beside / "vllm-bench" if options.output is None else options.output):
        print(path)
    if remark := vllm_bench.missing(found[""], rows):
        print(f"vllm-locust: {remark}", file=sys.stderr)
    return ExitCode.OK


def _list(options: argparse.Namespace) -> int:
    from vllm_locust import runs  # noqa: PLC0415 - verbs load what they need alone

    print(runs.text(options.directory), end="")
    return ExitCode.OK


def _demo(options: argparse.Namespace) -> int:
    from vllm_locust import demo  # noqa: PLC0415 - verbs load what they need alone

    users, run_time = str(options.users), options.run_time or ("5m" if options.stability else "60s")
    asked = demo.Demo(
        locustfile=_packaged("mixed.py"),
        host=options.host,
        load=("-t", run_time, *(() if options.stability else ("-u", users, "-r", users))),
        results=options.results,
        prometheus_port=demo.free_metrics_port(options.prometheus_port),
        extra=tuple(options.more),
    )
    if not options.stability:
        return demo.run(asked)
    stages = {"stages": options.stages, "stage_time": options.stage_time, "limit": options.limit}
    return demo.run_stability(asked, _packaged("stability.py"), **stages)


def _options(_: argparse.Namespace) -> int:
    # `locust --help` ends before it loads a locustfile, and knows no plugins.
    from locust.argument_parser import get_empty_argument_parser  # noqa: PLC0415 - verbs load what they need alone

    from vllm_locust.options import GROUP, add_options  # noqa: PLC0415 - as above

    parser = get_empty_argument_parser(add_help=False)
    add_options(parser)
    before_examples, _, _ = parser.format_help().partition("\nExamples:")
    print(before_examples[before_examples.index(f"{GROUP}:") :])
    return ExitCode.OK


def _path(options: argparse.Namespace) -> int:
    print(_packaged(options.name))
    return ExitCode.OK


def _packaged(name: str) -> Path:
    """Return where a packaged file is, in the wheel or in a checkout."""
    here = Path(__file__).parent
    folders = [root / kind for root in (here, here.parent) for kind in ("locustfiles", "scenarios", "assets")]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    kinds = (".py", ".toml", ".json")
    known = {path.name for folder in folders for path in folder.glob("*.*") if path.suffix in kinds}
    raise InputError(f"{name!r} is not packaged; there are {format_list(sorted(known))}")
