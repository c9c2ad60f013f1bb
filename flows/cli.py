"""The command line: outrider run | estimate | inspect | status | report | promote | rollback | drafts | verify |
prune | settings."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

ENVIRONMENT = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_LOGGING_LEVEL": "WARNING",
}

DONE, FAILED, REFUSED = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status: 0 done, 1 failed, 2 settings refused."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except KeyboardInterrupt:
        print("outrider: stopped", file=sys.stderr)  # a run has logged where, and how to go on
        return FAILED
    except BrokenPipeError:
        return FAILED
    except Exception as error:
        if options.debug:
            raise
        print(f"outrider: {_one_line(error)}", file=sys.stderr)
        return REFUSED if type(error).__name__ == "SettingsError" else FAILED


def _run(options: argparse.Namespace) -> int:
    from flows.display import shown_run  # noqa: PLC0415 - each command imports what it needs
    from flows.server import api_server  # noqa: PLC0415
    from flows.settings import load_settings  # noqa: PLC0415
    from storage.store import Store  # noqa: PLC0415
    from tasks.eagle3.draft_plan import check_file  # noqa: PLC0415
    from tasks.gpus import check_there  # noqa: PLC0415
    from tasks.verifier_sources import check_local  # noqa: PLC0415

    settings = load_settings(options.file, options.set)
    # what these refuse should not wait for a server to start
    Store(settings.store).check_writable()
    check_file(settings.draft)
    check_there(settings.devices)
    check_local(settings.verifier)
    with shown_run(debug=options.debug), api_server():
        from flows.train_draft import train_draft  # noqa: PLC0415

        record = train_draft(settings)
    if options.json:
        keys = ("run", "speculator", "acceptance_length", "seconds", "stages")
        print(json.dumps({key: record[key] for key in keys}))
    else:
        print(_summary(record))
    return DONE


def _estimate(options: argparse.Namespace) -> int:
    from flows.estimate import estimate, render  # noqa: PLC0415
    from flows.settings import load_settings  # noqa: PLC0415

    result = estimate(load_settings(options.file, options.set))
    print(json.dumps(result) if options.json else render(result))
    return DONE


def _inspect(options: argparse.Namespace) -> int:
    from tasks.inspect_text import render_inspection  # noqa: PLC0415
    from tasks.inspect_verifier import inspect_verifier  # noqa: PLC0415
    from tasks.verifier_sources import VerifierSettings  # noqa: PLC0415

    found = inspect_verifier(
        VerifierSettings(
            model=options.model,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
        )
    )
    print(json.dumps(found) if options.json else render_inspection(found))
    return DONE


def _status(options: argparse.Namespace) -> int:
    from flows.run_records import find_record, list_records, render_list, render_record  # noqa: PLC0415

    if options.run is None:
        records = list_records(options.store)
        print(json.dumps(records) if options.json else render_list(records))
    else:
        record = find_record(options.store, options.run)
        print(json.dumps(record) if options.json else render_record(record))
    return DONE


def _report(options: argparse.Namespace) -> int:
    from flows.run_records import find_record  # noqa: PLC0415
    from tasks.report import write_report  # noqa: PLC0415

    record = find_record(options.store, options.run)
    target = options.output or Path(f"outrider-{record['run']}.html")
    write_report(options.store, record, target)
    print(target)
    return DONE


def _verify(options: argparse.Namespace) -> int:
    from flows.run_records import expected_artifacts  # noqa: PLC0415
    from flows.settings import load_settings  # noqa: PLC0415
    from storage.store import Store  # noqa: PLC0415
    from tasks.verify import verify_store  # noqa: PLC0415

    store = Store(load_settings(options.file, options.set).store)
    expected = expected_artifacts(store)
    checked, problems = verify_store(
        store.url, deep=options.deep, repair=options.repair, expected=expected
    )
    for problem in problems:
        print(problem)
    how = "digests" if options.deep else "sizes"
    print(f"{checked} artifacts checked by {how}, problems: {len(problems)}")
    if not problems:
        return DONE
    if options.repair:
        print("what is wrong was set aside: run the settings again to make it anew")
        return DONE
    print("add --repair to set aside what is wrong; the next run then makes it anew")
    return FAILED


def _prune(options: argparse.Namespace) -> int:
    from flows.prune import Choice, carry_out, plan_prune, render_plan  # noqa: PLC0415
    from flows.settings import load_settings  # noqa: PLC0415
    from storage.store import Store  # noqa: PLC0415
    from tasks.byte_sizes import show_bytes  # noqa: PLC0415

    store, keep_bytes = Store(load_settings(options.file, options.set).store), options.keep_bytes
    choice = Choice(
        runs=tuple(options.run),
        older_than=options.older_than,
        keep_bytes=keep_bytes,
        states_only=options.states,
    )
    plan = plan_prune(store, choice)
    print(render_plan(plan))
    if keep_bytes is not None and plan.left_bytes > keep_bytes:
        print(f"more than {show_bytes(keep_bytes)} are left: the newest run and live ones stay")
    if options.dry_run:
        print("nothing was removed (--dry-run)")
    else:
        carry_out(store, plan)
    return DONE


def _promote(options: argparse.Namespace) -> int:
    from flows.draft_commands import promote  # noqa: PLC0415

    print(promote(options.store, options.run))
    return DONE


def _rollback(options: argparse.Namespace) -> int:
    from flows.draft_commands import roll_back  # noqa: PLC0415

    print(roll_back(options.store, options.draft))
    return DONE


def _drafts(options: argparse.Namespace) -> int:
    from flows.draft_commands import list_drafts, render_drafts  # noqa: PLC0415

    listed = list_drafts(options.store)
    print(json.dumps(listed) if options.json else render_drafts(listed))
    return DONE


def _settings(_: argparse.Namespace) -> int:
    from flows.settings import describe_settings  # noqa: PLC0415

    print(describe_settings())
    return DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="outrider", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int], about: str) -> Any:
        sub = commands.add_parser(name, help=about, description=about)
        sub.set_defaults(command=command, set=[])
        sub.add_argument("--debug", action="store_true", help="show tracebacks and debug lines")
        return sub

    def add_file(name: str, command: Callable[[argparse.Namespace], int], about: str) -> Any:
        sub = add(name, command, about)
        sub.add_argument("file", type=Path, metavar="FILE", help="settings file (YAML)")
        sub.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="change one setting, for example train.lr=1e-4; may be repeated",
        )
        return sub

    def add_store(sub: Any) -> Any:
        sub.add_argument(
            "--store",
            default=os.environ.get("OUTRIDER_STORE", "./runs"),
            help="URL of the store (default: $OUTRIDER_STORE or ./runs)",
        )
        return sub

    run = add_file("run", _run, "run the pipeline on a settings file; reuses what is there")
    run.add_argument("--json", action="store_true", help="print the result as one JSON line")
    sub = add_file(
        "estimate", _estimate, "count tokens and print bytes, files and GPU hours of a run"
    )
    sub.add_argument("--json", action="store_true", help="print as one JSON line")
    sub = add("inspect", _inspect, "print what is understood of a model, without its weights")
    sub.add_argument(
        "model",
        metavar="MODEL",
        help="as verifier.model: directory, URL, hub id, .gguf file or package://module/file",
    )
    sub.add_argument("--revision", help="branch, tag or commit of a hub id")
    sub.add_argument(
        "--trust-remote-code", action="store_true", help="accept a model that brings its own code"
    )
    sub.add_argument("--json", action="store_true", help="print as one JSON line")
    sub = add_store(add("status", _status, "list the runs of a store, or show one"))
    sub.add_argument("run", nargs="?", metavar="RUN", help="id of a run, or 'latest'")
    sub.add_argument("--json", action="store_true", help="print as JSON")
    sub = add_store(add("report", _report, "write one self-contained HTML page about a run"))
    sub.add_argument("run", metavar="RUN", help="id of a run, or 'latest'")
    sub.add_argument("--output", type=Path, help="file to write (default: outrider-RUN.html)")
    sub = add_store(
        add("promote", _promote, "put the draft of a run in service, whatever the gate said")
    )
    sub.add_argument("run", metavar="RUN", help="id of a run, or 'latest'")
    sub = add_store(add("rollback", _rollback, "put the draft before in service again"))
    sub.add_argument("draft", nargs="?", metavar="DRAFT", help="its name, where there are several")
    sub = add_store(add("drafts", _drafts, "list the drafts that are and were in service"))
    sub.add_argument("--json", action="store_true", help="print as one JSON line")
    sub = add_file("verify", _verify, "check every artifact of the store")
    sub.add_argument("--deep", action="store_true", help="read every byte and compare digests")
    sub.add_argument(
        "--repair", action="store_true", help="set aside what is wrong: the next run makes it anew"
    )
    sub = add_file("prune", _prune, "remove artifacts that no run of the store refers to")
    sub.add_argument(
        "--run",
        action="append",
        default=[],
        metavar="RUN",
        help="give this run up; may be repeated",
    )
    sub.add_argument(
        "--older-than", type=_age, metavar="AGE", help="give up runs that began so long ago: 30d"
    )
    sub.add_argument(
        "--keep-bytes",
        type=_bytes,
        metavar="SIZE",
        help="give up the oldest runs until this is left: 50GB",
    )
    sub.add_argument(
        "--states", action="store_true", help="of completed runs only the captured states"
    )
    sub.add_argument("--dry-run", action="store_true", help="print what would go, remove nothing")
    add("settings", _settings, "print the reference of all settings as Markdown")
    return parser


def _age(text: str) -> timedelta:
    from flows.prune import parse_age  # noqa: PLC0415

    return _parsed(parse_age, text)


def _bytes(text: str) -> int:
    from tasks.byte_sizes import parse_bytes  # noqa: PLC0415

    return _parsed(parse_bytes, text)


def _parsed(parse: Callable[[str], T], text: str) -> T:
    """Argparse shows the message of this error alone."""
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _summary(record: dict[str, Any]) -> str:
    from tasks.promote import describe  # noqa: PLC0415

    before, after = record["acceptance"]["before"], record["acceptance"]["after"]
    stages = record["stages"]
    side = record["settings"]["evaluate"]["side"].replace("_", "-")
    reused = [name for name, entry in stages.items() if entry["state"] == "reused"]
    draft_tokens = len(after["per_position"])
    promotion = describe(record["promotion"], in_service=record["promotion"]["in service"])
    lines = [
        f"acceptance length  {after['acceptance_length']:.2f} with {draft_tokens} draft tokens "
        f"({before['acceptance_length']:.2f} before training)",
        f"on                 {after['prompts']} {side} prompts, {_equality(after)}",
        f"speculator         {record['speculator']}",
        f"draft              {promotion}",
        f"reused             {len(reused)} of {len(stages)} stages"
        + (f": {', '.join(reused)}" if 0 < len(reused) < len(stages) else ""),
        f"run                {record['run']}, {record['seconds']:.0f} s",
    ]
    return "\n".join(lines)


def _equality(after: dict[str, Any]) -> str:
    rounded = after["differing_within_rounding"]
    if rounded:
        return f"{after['prompts'] - rounded} texts equal to the verifier's own, {rounded} within rounding"
    return "every text equal to the verifier's own"


def _one_line(error: BaseException) -> str:
    return " ".join((str(error) or type(error).__name__).split())


def console() -> None:
    """Entry point of the `outrider` command."""
    status = main()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            if stream is not None:  # it may have been closed before the start
                stream.flush()
    # not sys.exit: threads of native libraries that still run have aborted the interpreter's shutdown
    os._exit(status)


if __name__ == "__main__":
    console()
