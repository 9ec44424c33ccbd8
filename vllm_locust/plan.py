"""Options and user classes → the plan of a run: everything is checked here, before the first request.

Made by the master (or the single process) when Locust starts, or where a web form has the last word, when a run does.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from vllm_locust import limit, loadspec, samples, scenario
from vllm_locust.api import Counting
from vllm_locust.errors import InputError
from vllm_locust.fidelity import DEFAULTS, FLAGS, Limits
from vllm_locust.limit import Limit
from vllm_locust.load import Load
from vllm_locust.origin import read_ca
from vllm_locust.probe import Access, Target, probe
from vllm_locust.quantity import duration_s, format_list, share
from vllm_locust.requestlog import FORMATS
from vllm_locust.run import Settings, encode_scenarios
from vllm_locust.scenario import LOAD_KEYS, Given, Scenario
from vllm_locust.secret import blotted
from vllm_locust.timeouts import Timeouts
from vllm_locust.users import StreamUser, task_tags

_LONGEST_CONFIG = 65_536
"""Of what says how the server was started: whoever reads a run wants a command, and not a log."""
_LONG_RAMP = 0.25
"""Share of a run above which its ramp-up is worth a remark."""


_EXCLUDED = {
    "trace": ("request_rate", "arrivals", "burstiness", "stages", "stage_time"),
    "request_rate": ("trace", "trace_speed"),
    "arrivals": ("burstiness",),
}
"""What an option takes the place of in a scenario's `[load]`, beside the key of its own name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run will do."""

    settings: Settings
    target: Target
    scenarios: dict[str, Scenario]
    """By user class, those alone whose endpoint the server has."""
    encoded: bytes
    hash: str
    parts: tuple[str, ...]
    """Labels that will have requests, in the order of the files."""
    limits: tuple[Limit, ...] = ()
    """What the run has to meet."""
    stability: bool = False
    """Whether the run is judged as a stability test."""
    generator_limits: Limits = DEFAULTS
    request_log: str = ""
    """Format of the log of requests, empty where none is wanted."""
    remarks: tuple[str, ...] = field(default=())


def stream_classes(user_classes: Sequence[type]) -> list[type[StreamUser]]:
    """Return the user classes that stream."""
    return [cls for cls in user_classes if issubclass(cls, StreamUser)]


def load_scenarios(user_classes: Sequence[type], options: Any, locustfile: Path | None) -> dict[str, Scenario]:  # noqa: ANN401 - an argparse namespace
    """Load what each streaming user class sends; a class without a scenario streams bodies of its own."""
    folder = None if locustfile is None else locustfile.parent
    loaded = {}
    for cls in stream_classes(user_classes):
        name = options.scenario or cls.scenario
        if name:
            loaded[cls.__name__] = scenario.load(name, relative_to=folder, skip_bad_prompts=options.skip_bad_prompts)
        elif cls.tasks == [StreamUser.send_next]:
            raise InputError(
                f"user class {cls.__name__} has no scenario; set its `scenario`, or give --scenario "
                f"(packaged are {format_list(scenario.packaged())})"
            )
        else:
            loaded[cls.__name__] = Scenario("", ())
    return loaded


def make(user_classes: Sequence[type], options: Any, host: str | None, locustfile: Path | None) -> Plan:  # noqa: ANN401 - an argparse namespace
    """Check everything and ask the server; raises `InputError`, of which `TargetError` is the server's part."""
    streaming = stream_classes(user_classes)
    if not streaming:
        raise InputError("no user class streams; derive one from vllm_locust.ChatUser or CompletionsUser")
    scenarios = load_scenarios(user_classes, options, locustfile)
    kept_tags, exclude = tags(options)
    parts = _parts(scenarios, kept_tags, exclude, {tag for cls in user_classes for tag in task_tags(cls)})
    access = Access(
        url=_target(streaming, host),
        api_key=options.api_key or os.environ.get("OPENAI_API_KEY") or None,
        insecure=bool(options.insecure),
        ca_pem=read_ca(options.ca_file) if options.ca_file else None,
    )
    log_format = request_log(options)
    builders = [cls.__name__ for cls in streaming if cls.tasks != [StreamUser.send_next]]
    limits, goodput = limit.of_options(options.limit, options.goodput, scenarios.values(), None if builders else parts)
    asked = given(user_classes, options, locustfile)
    load = load_of(user_classes, options, asked, scenarios, (kept_tags, exclude))
    stability = bool(options.stability) or any(s.stability for s in scenarios.values())
    if stability:
        check_stability(load)
    window_ns = loadspec.window_ns(options.window, load, options.run_time)
    wanted = tuple(dict.fromkeys(cls.endpoint for cls in streaming))
    target = probe(access, model=options.model or None, endpoints=wanted)
    remarks = [*_remarks(streaming, scenarios, target)]
    kept = {
        cls.__name__: scenarios[cls.__name__]
        for cls in streaming
        if cls.endpoint in target.endpoints and _has_work(scenarios[cls.__name__], kept_tags, exclude)
    }
    remarks += [
        f"no part is left for user class {cls.__name__}; it was left out"
        for cls in streaming
        if not _has_work(scenarios[cls.__name__], kept_tags, exclude)
    ]
    load = msgspec.structs.replace(load, weights={name: w for name, w in load.weights.items() if name in kept})
    remarks += _load_remarks(load, options, asked)
    # What a run is judged by is no part of what is sent: equal hash, equal requests.
    encoded = encode_scenarios({name: replace(s, limits=(), goodput=(), stability=False) for name, s in kept.items()})
    settings = Settings(
        target=access.url,
        model=target.model,
        seed=_whole("--seed", options.seed),
        keep_alive=_keep_alive(options.connection),
        api_key=access.api_key,
        insecure=access.insecure,
        ca_pem=access.ca_pem,
        timeouts=timeouts(options),
        load=load,
        goodput=goodput,
        endpoints={cls.__name__: cls.endpoint for cls in streaming if cls.__name__ in kept},
        counting=Counting(continuous_usage=bool(options.continuous_usage), token_ids=bool(options.token_ids)),
        window_ns=window_ns,
        stop_timeout_s=float(options.stop_timeout or 0),
        tags=kept_tags,
        exclude_tags=exclude,
        exact_length=target.exact_length,
        request_log=bool(log_format),
        log_text=bool(options.log_text),
        samples=samples_wanted(options),
    )
    return Plan(
        settings=settings,
        target=target,
        scenarios=kept,
        encoded=encoded,
        hash=scenario.digest(encoded),
        parts=parts,
        limits=limits,
        stability=stability,
        generator_limits=generator_limits(options),
        request_log=log_format,
        remarks=tuple(remarks),
    )


def given(user_classes: Sequence[type], options: Any, locustfile: Path | None) -> dict[str, Given]:  # noqa: ANN401 - an argparse namespace
    """Return what was asked of the load: by scenarios, of which one alone may ask, and by options, which win."""
    folder = None if locustfile is None else locustfile.parent
    named = (str(options.scenario or cls.scenario or "") for cls in stream_classes(user_classes))
    tables = {
        name: table
        for name in dict.fromkeys(filter(None, named))
        if (table := scenario.load_keys(name, relative_to=folder))
    }
    if len(tables) > 1:
        raise InputError(
            f"the scenarios {format_list(tables)} both have a [load]; a run has one: "
            "keep it in one of them, or give --scenario"
        )
    flags = {key: Given(f"--{key.replace('_', '-')}", getattr(options, key)) for key in LOAD_KEYS}
    flags = {key: value for key, value in flags.items() if value.value not in (None, "")}
    replaced = {excluded for key in flags for excluded in _EXCLUDED.get(key, ())}
    asked = next(iter(tables.values()), {})
    return {key: value for key, value in asked.items() if key not in replaced} | flags


def load_of(
    user_classes: Sequence[type],
    options: Any,  # noqa: ANN401 - an argparse namespace
    asked: dict[str, Given],
    scenarios: dict[str, Scenario],
    kept_and_not: tuple[tuple[str, ...], tuple[str, ...]],
) -> Load:
    """Return the load that was asked for; raises `InputError` where the user classes cannot make it."""
    streaming = stream_classes(user_classes)
    once = [cls.__name__ for cls in streaming if scenarios[cls.__name__].once]
    if once and len(streaming) > 1:
        names = format_list(cls.__name__ for cls in streaming)
        raise InputError(
            f'order = "once" sends each prompt once, by one user class; there are {names}: '
            "name one of them after Locust's options"
        )
    load = loadspec.parse(
        asked,
        seed=_whole("--seed", options.seed),
        weights={cls.__name__: int(cls.weight) for cls in streaming},
        once=scenarios[once[0]].only(*kept_and_not).prompts if once else None,
        run_time_s=loadspec.run_time_s(asked),
    )
    own = [cls.__name__ for cls in streaming if cls.tasks != [StreamUser.send_next]]
    what = "a request rate" if load.arrivals is not None else "a fixed number of requests"
    if own and (load.arrivals is not None or load.requests is not None):
        raise InputError(f"user class {own[0]} builds its own requests, which {what} cannot send; give it a scenario")
    uneven = [cls for cls in streaming if cls.weight != int(cls.weight)]
    if uneven and (load.arrivals is not None or load.requests is not None):
        name, weight = uneven[0].__name__, uneven[0].weight
        raise InputError(
            f"user class {name} has weight {weight}, but {what} is shared out by whole numbers like 1 and 2"
        )
    others = [cls.__name__ for cls in user_classes if cls not in streaming]
    if others and load.requests is not None and load.arrivals is None:
        raise InputError(f"user class {others[0]} does not stream, and {what} would wait for it; leave it out")
    return load


def check_stability(load: Load) -> None:
    """Refuse a stability test that is not at a fixed rate."""
    if load.stages:
        raise InputError(
            "a stability test is at one rate, and has no stages: find the rate by them, in a run before it"
        )
    if load.arrivals is None:
        raise InputError(
            "a stability test needs a rate: --request-rate, 70 to 80 % of the last good one, which "
            '--request-rate stages --stages 5,10,20,40 --limit "ttft p95 < 500ms" finds in a run of its own'
        )


def _load_remarks(load: Load, options: Any, asked: dict[str, Given]) -> Iterator[str]:  # noqa: ANN401 - an argparse namespace
    if load.arrivals is not None:
        yield "requests leave at their rate, whatever the number of users (-u), who stand by"
    run_s, users, rate = options.run_time, options.num_users, options.spawn_rate
    ramp_s = ((users or 1) - 1) / (rate or 1)  # the first user comes at once
    if run_s and ramp_s > _LONG_RAMP * run_s and load.arrivals is None and not load.stages:
        yield f"the ramp-up takes {ramp_s:.0f} s of {run_s:.0f} s; a higher spawn rate (-r) shortens it"
    if load.stages and load.arrivals is not None and asked["request_rate"].value != loadspec.STAGES:
        yield f"the stages are the rates; {asked['request_rate'].where} {asked['request_rate'].value} is not used"
    if load.stages and load.arrivals is None and options.num_users not in (None, load.stages[0]):
        yield f"the stages are the numbers of users; -u {options.num_users} is not used"


def generator_limits(options: Any) -> Limits:  # noqa: ANN401 - an argparse namespace
    """Return how far the generator may be off; what the user did not set is the default."""
    texts = {name: getattr(options, flag.removeprefix("--").replace("-", "_")) for name, flag in FLAGS.items()}
    given = {name: share(text, where=FLAGS[name]) for name, text in texts.items() if text not in (None, "")}
    return Limits(**given, given=tuple(given))


def server_config(options: Any) -> str:  # noqa: ANN401 - an argparse namespace
    """Return the text of the file that says how the server was started, without our key; empty where none is given."""
    if not options.server_config:
        return ""
    where = f"--server-config {options.server_config}"
    try:
        data = Path(options.server_config).read_bytes()
        text = data.decode()
    except OSError as error:
        raise InputError(f"{where}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: no UTF-8 text (byte {error.start}); give the command or the settings") from error
    if len(data) > _LONGEST_CONFIG:
        raise InputError(
            f"{where}: {len(data):,} bytes, at most {_LONGEST_CONFIG:,} are kept; leave out what is not asked"
        )
    return blotted(text.strip(), options.api_key or os.environ.get("OPENAI_API_KEY"))


def request_log(options: Any) -> str:  # noqa: ANN401 - an argparse namespace
    """Return the format of the log of requests, empty where none is wanted."""
    given = str(options.request_log or "")
    if given and given not in FORMATS:
        raise InputError(f"--request-log is {given!r}, expected {format_list(FORMATS)}")
    if options.log_text and not given:
        raise InputError("--log-text is for the log of requests; add --request-log")
    return given


def samples_wanted(options: Any) -> int:  # noqa: ANN401 - an argparse namespace
    """Return how many answers of each scenario are kept, 0 where none are wanted."""
    if options.save_samples in (None, ""):
        return 0
    wanted = _whole("--save-samples", options.save_samples)
    if not 1 <= wanted <= samples.MOST:
        raise InputError(f"--save-samples is {wanted}, expected 1 to {samples.MOST:,} of each scenario")
    return wanted


def timeouts(options: Any) -> Timeouts:  # noqa: ANN401 - an argparse namespace
    """Return how long streams are waited for; raises `InputError`."""
    connect_s = _wait_s("--connect-timeout", options.connect_timeout)
    if connect_s is None:
        raise InputError(
            "--connect-timeout is none, expected a duration like 10s: a server that is not there never answers"
        )
    return Timeouts(
        connect_s=connect_s,
        first_token_s=_wait_s("--first-token-timeout", options.first_token_timeout),
        idle_s=_wait_s("--idle-timeout", options.idle_timeout),
        token_s=_wait_s("--token-timeout", options.token_timeout),
        total_s=_wait_s("--total-timeout", options.total_timeout),
    )


def _wait_s(flag: str, text: str) -> float | None:
    """Return for how long to wait, None for ever."""
    if text.strip().lower() == "none":
        return None
    wait_s = duration_s(text, where=flag)
    if not wait_s:
        raise InputError(f"{flag} is {text}, expected a duration above 0, or none to wait for ever")
    return wait_s


def _has_work(plan: Scenario, tags: tuple[str, ...], exclude: tuple[str, ...]) -> bool:
    """Tell whether tags leave a class anything to send; one that builds its own bodies always has."""
    return not plan.parts or bool(plan.only(tags, exclude).parts)


def _target(streaming: list[type[StreamUser]], host: str | None) -> str:
    hosts = {host} if host else {cls.host for cls in streaming if cls.host}
    if len(hosts) != 1:
        what = (
            "no server is named"
            if not hosts
            else f"the user classes name several servers: {format_list(sorted(hosts))}"
        )
        raise InputError(f"{what}; give one by --host, like --host http://my-server:8000")
    return str(hosts.pop()).rstrip("/")


def tags(options: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:  # noqa: ANN401 - an argparse namespace
    """Return the parts to send and to leave out, from --tags, --exclude-tags and the field `parts` of the web form."""
    parts = [name.strip() for name in (options.parts or "").split(",") if name.strip()]
    return tuple(parts or options.tags or ()), tuple(options.exclude_tags or ())


def labels(
    user_classes: Sequence[type], scenarios: dict[str, Scenario], kept_and_not: tuple[tuple[str, ...], tuple[str, ...]]
) -> list[tuple[str, str]]:
    """Return scenario and endpoint of all that these scenarios will send."""
    return [
        (part.name, cls.endpoint)
        for cls in stream_classes(user_classes)
        if cls.__name__ in scenarios
        for part in scenarios[cls.__name__].only(*kept_and_not).parts
    ]


def _parts(
    scenarios: dict[str, Scenario], tags: tuple[str, ...], exclude: tuple[str, ...], of_tasks: set[str]
) -> tuple[str, ...]:
    """Return the parts that tags leave; a tag may also be one of the user classes' own tasks."""
    known = dict.fromkeys(part.name for s in scenarios.values() for part in s.parts)
    unknown = [tag for tag in (*tags, *exclude) if tag not in known and tag not in of_tasks]
    if unknown:
        raise InputError(f"--tags, --exclude-tags or parts: no part {unknown[0]!r}; there are {format_list(known)}")
    kept = dict.fromkeys(part.name for s in scenarios.values() for part in s.only(tags, exclude).parts)
    if known and not kept and not of_tasks.intersection(tags):
        raise InputError(f"--tags and --exclude-tags leave no part of {format_list(known)}")
    return tuple(kept)


def _remarks(
    streaming: list[type[StreamUser]],
    scenarios: dict[str, Scenario],
    target: Target,
) -> list[str]:
    remarks = [
        f"the server has no {cls.endpoint} endpoint; user class {cls.__name__} was left out"
        for cls in streaming
        if cls.endpoint not in target.endpoints
    ]
    loaded = {part.name: part for s in scenarios.values() for part in s.parts}.values()
    if not target.exact_length and any(part.output_tokens for part in loaded):
        remarks.append("the server does not take min_tokens and ignore_eos; output_tokens is only the longest answer")
    remarks += [
        f"{part.name}: {len(part.prompts)} prompts used, {part.skipped_prompts} bad lines skipped"
        for part in loaded
        if part.skipped_prompts
    ]
    return remarks


def _keep_alive(value: str) -> bool:
    if value not in ("keep-alive", "new"):
        raise InputError(f"--connection is {value!r}, expected keep-alive or new")
    return value == "keep-alive"


def _whole(flag: str, value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise InputError(f"{flag} is {value!r}, expected a whole number") from None
