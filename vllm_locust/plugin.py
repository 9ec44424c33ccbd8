"""The only place that registers listeners and options with Locust; importing it makes a process a host of the plugin.

Three roles: a master plans and holds the recording, a worker sends, and a single process does both. Locust swallows
what listeners raise, so errors of the user are turned into a message and an exit code here.
"""

import logging
import platform
import shlex
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import gevent
import gevent.event
import locust
from locust import events
from locust.env import Environment
from locust.event import EventHook
from locust.runners import STATE_STOPPED, MasterRunner, Runner, WorkerRunner

from vllm_locust import (
    __version__,
    exporter,
    host,
    listener,
    live,
    loadspec,
    options,
    page,
    plan,
    progress,
    report,
    requestlog,
    results,
    samples,
    summary,
    verdict,
    webui,
)
from vllm_locust.cluster import POLL_S, REQUESTS, SAMPLES, TICK_S
from vllm_locust.errors import ExitCode, InputError
from vllm_locust.fidelity import DEFAULTS
from vllm_locust.generator import generator_of
from vllm_locust.load import Load
from vllm_locust.master import Master
from vllm_locust.pace import Pace
from vllm_locust.quantity import duration_s
from vllm_locust.run import Phase
from vllm_locust.scenario import Scenario
from vllm_locust.secret import blotted
from vllm_locust.terminal import printable
from vllm_locust.users import ChatUser, CompletionsUser, restore_tasks, task_tags
from vllm_locust.worker import Worker

logger = logging.getLogger(__name__)

_PROGRESS_S = 5


def attach(environment: Environment, runner: Runner | None = None, **_: Any) -> None:
    """Make a Locust process take part, in the role that its runner has."""
    environment.events.ttft, environment.events.itl = EventHook(), EventHook()  # type: ignore[attr-defined]
    runner = runner or environment.runner
    if runner is None or environment.parsed_options is None:
        return
    if not plan.stream_classes(environment.user_classes) and not isinstance(runner, WorkerRunner):
        return
    if not any(task_tags(user_class) for user_class in environment.user_classes):
        # Tags name parts of scenarios here; Locust's filter would find nothing to keep, and warn of that.
        environment._tasks_filtered = True  # noqa: SLF001 - there is no other way to tell
    host.prepare()
    if isinstance(runner, WorkerRunner):
        worker = Worker(environment, runner, generator_of(environment))
        host.interrupt_main_greenlet_only(worker.hurry)
        # A process that only sends has no verdict: its failures are the master's to judge.
        environment.process_exit_code = int(ExitCode.OK)
        environment.events.test_stopping.add_listener(lambda **_: worker.halt())
        # Registered after Locust's own, hence called before it: quitting listeners run in reverse.
        environment.events.quitting.add_listener(lambda **_: worker.leave())
        return
    if not isinstance(runner, MasterRunner):
        Worker(environment, runner, generator_of(environment))
    try:
        plugin = Plugin(environment, runner)
    except InputError as error:
        _refuse(error, runner, forked=bool(environment.parsed_options.processes))
    plugin.listen()
    host.interrupt_main_greenlet_only(plugin.hurry)


def restore(environment: Environment, **_: Any) -> None:
    """Undo Locust's tag filter, which runs right before; a worker's first run may begin before it is attached."""
    for user_class in plan.stream_classes(environment.user_classes):
        restore_tasks(user_class)


def _refuse(error: InputError, runner: Runner, *, forked: bool) -> NoReturn:
    if forked:
        runner.greenlet.kill()  # it would go on to tell of workers that come
        host.end_forks()
    print(f"vllm-locust: {error}", file=sys.stderr)  # noqa: T201 - the user's terminal
    sys.exit(int(error.exit_code))


class Plugin:
    """The plugin in a master or a single process: from options to the saved run."""

    def __init__(self, environment: Environment, runner: Runner) -> None:
        """Check all that can be checked before anything starts; raises `InputError`."""
        self._environment = environment
        self._runner = runner
        assert environment.parsed_options is not None  # noqa: S101 - `attach` has looked
        self._options = environment.parsed_options
        self._results = Path(self._options.results)
        self._command = _command(self._options)
        """As it was given: a form changes options, and secrets among them, but not the command line."""
        finish_timeout_s = duration_s(self._options.finish_timeout, where="--finish-timeout")
        self._master = Master(runner, self._results, finish_timeout_s)
        self._pace = Pace(runner, self._master, self._end)
        self._prepared: plan.Plan | None = None
        self._started = ""
        self._name = "run"
        self._note = ""
        self._reset = False
        """Whether --reset-stats has had its one reset of the run."""
        self._run: results.Run | None = None
        self._saved: Path | None = None
        self._page: Path | None = None
        self._kept: dict[str, object] = {}  # paths of what workers kept, by what the report calls it
        self._written = gevent.event.Event()
        """Set unless what workers kept is being written."""
        self._written.set()
        self._metrics = ""
        plan.generator_limits(self._options)
        plan.request_log(self._options)
        plan.samples_wanted(self._options)
        plan.timeouts(self._options)
        self._server_config = plan.server_config(self._options)
        self._exporter = exporter.Exporter(self._snapshot)
        self._fill_in()
        results.check_writable(self._results)
        port = listener.port_of(self._options.prometheus_port)
        if port:
            listener.serve(self._exporter.registry, port)
            self._metrics = f"http://localhost:{port}/metrics"
            logger.info("metrics are at %s", self._metrics)
        if environment.web_ui is not None:
            shown = live.Live(self._snapshot)
            webui.add_tabs(environment.web_ui, shown)
            webui.add_pages(environment.web_ui, shown, self._options.web_base_path or "")
            webui.forget_run_time(environment.web_ui, self._options)
        if self._immediate:
            self._prepared = self._plan()
            kept = self._prepared.scenarios
            environment.user_classes[:] = [
                cls for cls in environment.user_classes if cls.__name__ in kept or cls not in plan.stream_classes([cls])
            ]
            for remark in self._prepared.remarks:
                logger.warning(remark)
        else:
            plan.load_scenarios(environment.user_classes, self._options, self._locustfile)

    def listen(self) -> None:
        """Register with Locust's events."""
        hooks = self._environment.events
        hooks.test_start.add_listener(self._guard(self._on_test_start))
        hooks.test_stopping.add_listener(self._guard(self._on_test_stopping))
        hooks.test_stop.add_listener(self._guard(self._on_test_stop))
        hooks.reset_stats.add_listener(self._guard(self._on_reset))
        hooks.spawning_complete.add_listener(self._guard(self._on_spawning_complete))
        hooks.quit.add_listener(self._guard(self._on_quit))
        hooks.quitting.add_listener(self._guard(self._on_quitting))
        hooks.worker_connect.add_listener(lambda client_id, **_: self._master.join(client_id))
        gevent.spawn(self._tick_for_ever)

    def _guard(self, act: Callable[[], None]) -> Callable[..., None]:
        return lambda **_: act()

    @property
    def _immediate(self) -> bool:
        """Whether the run starts by itself, so that nobody can mend an error in a form."""
        return bool(self._options.headless or self._options.autostart)

    @property
    def _locustfile(self) -> Path | None:
        files = self._environment.parsed_locustfiles or []
        return Path(files[0]).absolute() if files else None

    def _plan(self) -> plan.Plan:
        return plan.make(self._environment.user_classes, self._options, self._environment.host, self._locustfile)

    def _fill_in(self) -> None:
        """Take from the scenario, or from the stages, what Locust wants to know and nobody has said."""
        options, classes = self._options, self._environment.user_classes
        asked = plan.given(classes, options, self._locustfile)
        scenarios = plan.load_scenarios(classes, options, self._locustfile)
        load = plan.load_of(classes, options, asked, scenarios, plan.tags(options))
        options.run_time = options.run_time or loadspec.run_time_s(asked)
        if load.stages and load.arrivals is None:
            options.num_users = options.num_users or int(load.stages[0])
            options.spawn_rate = options.spawn_rate or max(load.stages)
        # Before any run, so that Prometheus has seen counters at 0 when the first one begins.
        self._expect(scenarios, load, good=bool(options.goodput or any(s.goodput for s in scenarios.values())))

    def _expect(self, scenarios: dict[str, Scenario], load: Load, *, good: bool) -> None:
        labels = plan.labels(self._environment.user_classes, scenarios, plan.tags(self._options))
        self._exporter.expect(labels, load, good=good)

    # A run

    def _on_test_start(self) -> None:
        prepared, self._prepared = self._prepared, None
        try:
            prepared = prepared or self._plan()
            self._pace.check(prepared.settings.load)
        except InputError as error:
            self._refuse_run(error)
        self._written.wait()  # the run before may still be writing
        self._run = self._saved = self._page = None
        self._kept = {}
        self._name, self._reset = self._options.name or "run", False
        self._note = self._options.note or ""
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        self._environment.stop_timeout = float(self._options.stop_timeout or 0)
        settings = prepared.settings
        self._expect(prepared.scenarios, settings.load, good=settings.goodput is not None)
        if self._master.recording is not None:  # at the last moment: what is retired counts no more reports
            self._exporter.retire(self._master.recording)
        self._master.begin(prepared)
        self._pace.begin(prepared.settings.load)

    def _refuse_run(self, error: InputError) -> NoReturn:
        """Have Locust spawn nobody: users would wait for a run that never begins, and a stop for them."""
        self._master.refuse()
        logger.error("the run was refused: %s", error)
        self._runner.log_exception("vllm-locust", str(error), "")
        self._runner.update_state(STATE_STOPPED)
        self._runner._users_dispatcher = None  # noqa: SLF001 - as Locust's stop leaves it
        if self._immediate:
            self._environment.process_exit_code = int(error.exit_code)
            gevent.spawn(self._end)
        raise gevent.GreenletExit  # ends the greenlet that starts the run; an Exception Locust logs, and goes on

    def _end(self) -> None:
        """End the run as Locust does at --run-time."""
        if self._options.headless:
            self._runner.quit()
            return
        self._runner.stop()
        if self._options.autostart and self._options.autoquit != -1:
            gevent.sleep(self._options.autoquit)
            self._runner.quit()
            if self._environment.web_ui is not None:
                self._environment.web_ui.stop()

    def hurry(self) -> None:
        """Cut what still streams, at a second Ctrl-C."""
        self._master.hurry()

    def _on_test_stopping(self) -> None:
        if self._master.phase not in (Phase.RUNNING, Phase.FINISHING):
            return  # a run that was refused: nothing may come between its stop and the next start
        self._pace.stop()
        self._master.finish(float(self._options.stop_timeout or 0))
        if not isinstance(self._runner, MasterRunner):
            self._environment.stop_timeout = 0.0
            gevent.sleep(POLL_S)  # Locust logs an error for a user that has just ended, as all do now

    def _on_test_stop(self) -> None:
        master = self._master
        if master.phase is not Phase.FINISHED or master.recording is None or self._run is not None:
            return
        self._update_rows()
        self._run = results.Run.of(master.recording, self._meta())
        code = verdict.exit_code(verdict.findings(self._run.summary, self._run.meta))
        try:
            self._saved = results.save(self._run, self._results)
            self._save_kept(self._saved.parent)
            self._page = self._save_page(self._saved.parent) if self._options.html_report else None
            if self._options.saved_path:
                results.save_text(str(self._saved.absolute()), Path(self._options.saved_path))
        except InputError as error:  # the disk is full, say: what was measured is shown all the same
            logger.error("%s is not saved: %s", "the report" if self._saved else "the run", error)
            code = ExitCode.NOT_RUN
        except OSError as error:
            logger.error("what the workers kept is not saved: %s", error)
            code = ExitCode.NOT_RUN
        self._environment.process_exit_code = int(code)
        if not self._options.headless:
            self._print_report()
        elif not master.live_workers:
            # Locust has ended a run whose workers have all gone, and would wait for its time to be over, if it has one.
            gevent.spawn(self._end)

    def _save_page(self, directory: Path) -> Path:
        """Write the report with charts beside the run."""
        assert self._run is not None  # noqa: S101 - the run is over
        path = directory / "report.html"
        results.save_text(page.of_run(self._run), path)
        return path

    def _save_kept(self, directory: Path) -> None:
        """Write what the workers kept beside the run: the log of requests, samples of answers."""
        kept, prepared = self._master.kept, self._master.plan
        assert prepared is not None  # noqa: S101 - the run is over
        for remark in self._master.missing_rows:
            logger.warning(remark)
        self._written.clear()
        try:
            if REQUESTS in kept:
                form, texts = prepared.request_log, prepared.settings.log_text
                path = directory / f"requests.{form}"
                kept[REQUESTS].save(path, partial(requestlog.write, form=form, texts=texts))
                self._kept["Requests"] = path
            if SAMPLES in kept:
                path = directory / samples.FILE_NAME
                kept[SAMPLES].save(path, partial(samples.write, most=prepared.settings.samples))
                self._kept["Samples"] = samples.line(path)
        finally:
            for downloads in kept.values():
                downloads.close()
            self._written.set()

    def _on_quitting(self) -> None:
        """Ctrl-C: a single process is told to quit before it is stopped, and its exit code is fixed in between."""
        self._written.wait()
        if not isinstance(self._runner, MasterRunner):
            self._runner.stop()
        if self._environment.process_exit_code is None and self._run is None:
            self._environment.process_exit_code = int(ExitCode.NOT_RUN if self._immediate else ExitCode.OK)

    def _on_quit(self) -> None:
        if self._run is None:
            return
        if self._options.processes:
            host.wait_for_forks()
        if self._options.headless:
            self._print_report()
        # The server's own words are what the user looks for where nothing worked: nothing is printed after them.
        if text := verdict.all_failed(self._run.summary):
            print(f"vllm-locust: {printable(text)}", file=sys.stderr, flush=True)  # noqa: T201 - the user's terminal

    def _on_reset(self) -> None:
        old = self._master.reset()
        if old is not None:
            self._exporter.retire(old)

    def _on_spawning_complete(self) -> None:
        """Obey --reset-stats; Locust fires at each rebalancing, and only the first time is the end of the ramp-up."""
        streaming = {cls.__name__ for cls in plan.stream_classes(self._environment.user_classes)}
        counts = self._runner.target_user_classes_count
        self._master.spawned(sum(number for name, number in counts.items() if name in streaming))
        if self._environment.reset_stats and not self._reset:
            self._reset = True
            self._on_reset()

    def _print_report(self) -> None:
        if self._run is not None:
            where = {"Saved": self._saved, "Page": self._page, **self._kept, "Metrics": self._metrics}
            lines = "".join(f"{label:10}{place}\n" for label, place in where.items() if place)
            text = report.text(self._run, full=bool(self._options.full))
            # Locust's --json has stdout to itself.
            file = sys.stderr if self._options.json else sys.stdout
            print(f"\n{text}{lines}", end="", flush=True, file=file)

    def _meta(self) -> summary.Meta:
        master, given = self._master, self._options
        assert master.plan is not None and master.recording is not None  # noqa: S101, PT018 - the run is over
        prepared = master.plan
        run_s = ((master.stop_ns or 0) - master.run_start_ns) / 1e9
        load = prepared.settings.load
        planned_s = load.length_ns / 1e9 if load.length_ns else given.run_time
        short = load.requests is not None and not master.complete
        early = short or bool(self._immediate and planned_s and run_s < planned_s - 1 and not self._pace.over)
        parts = {part.name: part for s in prepared.scenarios.values() for part in s.parts}
        caches = {"cold" if part.cold else "natural" for part in parts.values()}
        return summary.Meta(
            name=self._name,
            run=master.recording.run,
            started=self._started,
            plugin_version=__version__,
            locust_version=locust.__version__,
            python_version=platform.python_version(),
            command=self._command,
            note=self._note,
            server_config=self._server_config,
            target=prepared.settings.target,
            model=prepared.settings.model,
            scenarios={cls: s.name for cls, s in prepared.scenarios.items()},
            endpoints=prepared.settings.endpoints,
            parts=list(prepared.parts),
            scenario_hash=prepared.hash,
            seed=prepared.settings.seed,
            cache=", ".join(sorted(caches)),
            counting=prepared.settings.counting,
            load={
                "users": max(self._pace.most_users, self._runner.target_user_count),
                "spawn_rate": None if self._environment.shape_class else given.spawn_rate,
                "run_time_s": None if load.stages else given.run_time,
                "workers": len(master.members),
                **load.facts(),
            },
            expected_workers=[member.name for member in master.members.values()],
            missing_workers=master.missing,
            limits=[str(limit) for limit in prepared.limits],
            goodput=list(prepared.settings.goodput.texts) if prepared.settings.goodput is not None else [],
            stability=prepared.stability,
            generator_limits=prepared.generator_limits,
            ended_early=early,
            remarks=[
                *prepared.remarks,
                *master.remarks,
                *(f"{m.at_ns / 1e9:.0f} s: {m.text}" for m in master.recording.marks),
                *master.missing_rows,
            ],
        )

    # While it runs

    def _tick_for_ever(self) -> None:
        ticks = 0
        while True:
            gevent.sleep(TICK_S)
            if self._master.phase not in (Phase.RUNNING, Phase.FINISHING):
                continue
            ticks += 1
            if self._master.phase is Phase.RUNNING:
                self._master.watch()
                self._pace.tick()
            self._update_rows()
            if self._options.headless and ticks % _PROGRESS_S == 0:
                print(self._progress_line(), file=sys.stderr, flush=True)  # noqa: T201 - the user's terminal

    def _update_rows(self) -> None:
        if (recording := self._master.recording) is not None:
            webui.update_rows(self._environment.stats, recording.totals_of(webui.METRICS), recording.phases)

    def _progress_line(self) -> str:
        master = self._master
        assert master.recording is not None  # noqa: S101 - a run is on
        return progress.line(master.recording, time.monotonic_ns() - master.start_ns, master.live_workers)

    def _snapshot(self) -> exporter.Snapshot:
        master = self._master
        running = master.phase in (Phase.RUNNING, Phase.FINISHING)
        return exporter.Snapshot(
            recording=master.recording,
            before=tuple(master.before),
            running=running,
            users=self._runner.user_count if running else 0,
            workers=len(master.live_workers) if running else 0,
            live_workers=master.live_workers,
            warming_up=master.warming_up,
            limits=master.plan.generator_limits if master.plan else DEFAULTS,
            age_s=(time.monotonic_ns() - master.start_ns) / 1e9 if master.phase is Phase.RUNNING else None,
            meta=self._run.meta if self._run else self._meta() if master.recording else None,
            summary=self._run.summary if self._run else None,
            scenarios=tuple(master.scenarios),
        )


def _command(given: Any) -> str:  # noqa: ANN401 - an argparse namespace
    """Return how Locust was started, without our key, nor what the user's own options keep secret."""
    own = locust.argument_parser.get_parser().secret_args_included_in_web_ui
    secrets = [given.api_key, *(getattr(given, name, None) for name in own)]
    arguments = sys.argv[1:]
    for secret in secrets:
        arguments = [blotted(argument, secret and str(secret)) for argument in arguments]
    return shlex.join(["locust", *arguments])


events.init_command_line_parser.add_listener(options.add_options)
events.init.add_listener(attach)
events.test_start.add_listener(restore)

__all__ = ["ChatUser", "CompletionsUser", "Plugin", "attach"]
