"""`vllm-locust check`: would a run work? Scenario, prompts, server, model, context length, one answer per part."""

import argparse
import time
from collections.abc import Iterator

from vllm_locust import api, scenario
from vllm_locust.client import Client
from vllm_locust.errors import ExitCode, InputError, TargetError
from vllm_locust.generator import request_body
from vllm_locust.origin import origin_of, read_ca
from vllm_locust.probe import Access, Target, count_tokens, probe
from vllm_locust.prompts import Prompt
from vllm_locust.quantity import format_duration, format_list
from vllm_locust.run import new_run_id
from vllm_locust.scenario import Part, Pick
from vllm_locust.terminal import printable
from vllm_locust.timeline import Outcome, Timeline
from vllm_locust.timeouts import Timeouts
from vllm_locust.transport import Pool

_COUNTED = 256
"""Prompts of a part that are counted: enough to find a data set that does not fit, soon done."""


def check(options: argparse.Namespace) -> int:
    """Check what a run with these options would use, and print what was found."""
    plan = scenario.load(options.scenario, skip_bad_prompts=options.skip_bad_prompts)
    for part in plan.parts:
        skipped = f", {part.skipped_prompts} bad lines skipped" if part.skipped_prompts else ""
        print(f"scenario {plan.name}, part {printable(part.name)}: {len(part.prompts)} prompts{skipped}")
    access = Access(
        url=options.host.rstrip("/"),
        api_key=options.api_key,
        insecure=options.insecure,
        ca_pem=read_ca(options.ca_file) if options.ca_file else None,
    )
    target = probe(access, model=options.model, endpoints=tuple(api.PATHS))
    longest = f", context of {target.max_model_len:,} tokens" if target.max_model_len else ""
    endpoints = format_list(target.endpoints)
    print(f"server {printable(access.url)}: model {printable(target.model)}{longest}, endpoints {endpoints}")
    if not target.exact_length:
        print("  it does not take min_tokens and ignore_eos: output_tokens is only the longest answer")
    _check_context(access, target, plan)
    if options.no_request:
        return ExitCode.OK
    failed = list(_try_parts(access, target, plan))
    if failed:
        raise TargetError(f"{len(failed)} of {len(plan.parts) * len(target.endpoints)} requests failed, see above")
    return ExitCode.OK


def _check_context(access: Access, target: Target, plan: scenario.Scenario) -> None:
    """Refuse prompts that do not fit the model together with their answers, where the server can count tokens."""
    if target.max_model_len is None:
        return
    for part in plan.parts:
        for number, prompt in enumerate(part.prompts[:_COUNTED], 1):
            body = {"messages": prompt.messages} if prompt.messages else {"prompt": prompt.text}
            tokens = count_tokens(access, target.model, body)
            if tokens is None:
                print("  the server counts no tokens: whether every prompt fits its context is not checked")
                return
            answer = prompt.output_tokens or part.output_tokens or part.max_tokens or 1
            if tokens + answer > target.max_model_len:
                raise InputError(
                    f"part {part.name}, prompt {number}: {tokens:,} tokens and an answer of {answer:,} do not fit "
                    f"the context of {target.max_model_len:,} tokens"
                )
    print("every prompt and its answer fit the context")


def _try_parts(access: Access, target: Target, plan: scenario.Scenario) -> Iterator[Timeline]:
    """Ask for one answer per part and endpoint, each to the part's longest prompt; yields those that failed."""
    origin, prefix = origin_of(access.url, insecure=access.insecure, ca_pem=access.ca_pem)
    client = Client(Pool(origin), Timeouts(), access.api_key, prefix)
    for endpoint in target.endpoints:
        for part in plan.parts:
            timeline = _try(client, target, endpoint, part)
            print(f"  {endpoint:<11} {printable(part.name)}: {_found(timeline)}")
            if timeline.outcome is not Outcome.OK:
                yield timeline
    client.pool.close()


def _try(client: Client, target: Target, endpoint: str, part: Part) -> Timeline:
    prompt = max(part.prompts, key=_size)
    nonce = scenario.nonce(new_run_id(), "check", 0) if part.cold else ""
    chosen = Pick(part, prompt, prompt.output_tokens or part.output_tokens)
    body = request_body(chosen, endpoint, nonce, exact_length=target.exact_length)
    timeline = Timeline(
        request_id=f"check-{endpoint}-{part.name}".encode("ascii", "replace").decode(),
        scenario=part.name,
        endpoint=endpoint,
        called_ns=time.monotonic_ns(),
    )
    client.stream(timeline, api.encode_body(api.streaming(body, target.model, api.Counting())))
    return timeline


def _size(prompt: Prompt) -> int:
    if prompt.text is not None:
        return len(prompt.text.encode())
    return sum(len(str(message["content"])) for message in prompt.messages or ())


def _found(timeline: Timeline) -> str:
    if timeline.outcome is not Outcome.OK:
        status = f" {timeline.status}" if timeline.status else ""
        return f"{timeline.outcome}{status}: {printable(timeline.message)}"
    ttft = format_duration((timeline.ttft_ns or 0) / 1e9)
    reasons = format_list(sorted(set(timeline.finish_reasons.values())))
    counted = "estimated" if timeline.estimated else "from usage"
    tokens = f"{timeline.input_tokens or '?'} tokens in, {timeline.output_tokens} out ({counted})"
    return f"ok, TTFT {ttft}, {tokens}, finish reason {printable(reasons)}"
