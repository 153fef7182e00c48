"""``gcore-agents conformance``: check an endpoint that claims token-exact traces."""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from gcore_agents.conformance.case import Case
from gcore_agents.conformance.cases import list_cases
from gcore_agents.conformance.cli.table import write_failures, write_table
from gcore_agents.conformance.runner import (
    CLIENTS,
    CaseResult,
    Endpoint,
    RemoteEndpoint,
    ScriptedEndpoint,
    run_cases,
)
from gcore_agents.conformance.templates import (
    list_model_templates,
    list_templates,
    read_template,
)
from gcore_agents.conformance.traffic import list_traffic_cases

_PROGRESS_S = 5.0
_DESCRIPTION = """\
Check that an endpoint keeps the tokens of an agent's conversations exactly: the tokens on a path are what the engine
was given and gave, a sampled token is in one node and never changes, what is sent back unchanged is continued, and
what is changed starts a branch.

Without --base-url the cases run on this package's endpoint, with a scripted engine, in this process: no model is
needed. With it they run on another endpoint, as far as it shows tokens: a graph of the session at
/session/graph?tokens=1, as this package's, or prompt_token_ids and token_ids in replies to calls with
return_token_ids, as vLLM's. Cases that need the engine's own account, or turns that are known, do not apply there."""
_EPILOG = """\
examples:
  gcore-agents conformance
  gcore-agents conformance --templates all --dialects chat anthropic
  gcore-agents conformance --templates ./chat_template.jinja --cases several-rounds reasoning-dropped
  gcore-agents conformance --base-url http://localhost:8000/v1 --key EMPTY --model Qwen/Qwen3-0.6B --dialects chat

exit code: 0 if no case failed, 1 if one did, 2 for wrong arguments."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    parser = _make_parser()
    options = parser.parse_args(arguments)
    if options.list:
        _print_list()
        return 0
    cases = _choose_cases(parser, options.cases)
    templates = _choose_templates(parser, options)
    endpoint: Endpoint = ScriptedEndpoint()
    if options.base_url:
        endpoint = RemoteEndpoint(options.base_url, key=options.key, model=options.model)
    results = asyncio.run(_run(endpoint, cases, dialects=options.dialects, templates=templates))
    print(write_table(results))
    failures = write_failures(results)
    if failures:
        print(f"\n{failures}")
    print(f"\n{_summarize(results)}")
    if options.json:
        rows = [asdict(result) for result in results]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(bool(failures))


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gcore-agents", description="Tools of gcore-agents.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "conformance",
        help="check an endpoint that claims token-exact traces",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--base-url",
        metavar="URL",
        default="",
        help="another endpoint, such as http://HOST:PORT/v1",
    )
    command.add_argument(
        "--key",
        default="EMPTY",
        help="its API key; of this package's: the session's (default: %(default)s)",
    )
    command.add_argument(
        "--model", default="policy", help="name of the model in calls (default: %(default)s)"
    )
    command.add_argument(
        "--templates",
        nargs="+",
        metavar="NAME",
        help="chat templates, by name or file; 'all': also those of models, which come with TRL (default: "
        "this package's)",
    )
    command.add_argument(
        "--dialects",
        nargs="+",
        metavar="NAME",
        choices=[*CLIENTS],
        default=[*CLIENTS],
        help=f"of {', '.join(CLIENTS)} (default: all)",
    )
    command.add_argument("--cases", nargs="+", metavar="NAME", help="run only these cases")
    command.add_argument("--list", action="store_true", help="list cases and templates, and stop")
    command.add_argument(
        "--json", type=Path, metavar="FILE", help="write a list of all results to a file, too"
    )
    return parser


def _list_all() -> list[Case]:
    return [*list_cases(), *list_traffic_cases()]


def _choose_cases(parser: argparse.ArgumentParser, names: Sequence[str] | None) -> list[Case]:
    cases = _list_all()
    if names is None:
        return cases
    known_names = {case.name for case in cases}
    for name in names:
        if name not in known_names:
            parser.error(f"--cases: {name!r} is no case; see --list")
    return [case for case in cases if case.name in names]


def _choose_templates(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    if options.base_url:
        if options.templates:
            parser.error("--templates: the template of another endpoint is its own")
        return ["its own"]
    names: list[str] = []
    for name in options.templates or list_templates():
        if name == "all":
            names.extend([*list_templates(), *list_model_templates()])
            continue
        try:
            read_template(name)
        except ValueError as error:
            parser.error(f"--templates: {error}")
        names.append(name)
    return names


def _print_list() -> None:
    cases = _list_all()
    width = max(len(case.name) for case in cases)
    print("cases:")
    for case in cases:
        print(f"  {case.name.ljust(width)}  {case.summary} ({', '.join(case.dialects)})")
    print("\ntemplates of this package:")
    print(f"  {', '.join(list_templates())}")
    models = list_model_templates()
    print("\ntemplates of models, from TRL:")
    print(f"  {', '.join(models) if models else 'none; they need `pip install trl`'}")


async def _run(
    endpoint: Endpoint, cases: Sequence[Case], *, dialects: Sequence[str], templates: Sequence[str]
) -> list[CaseResult]:
    """Run cases, and report progress if it takes long."""
    results: list[CaseResult] = []
    await endpoint.start()
    next_report_s = time.monotonic() + _PROGRESS_S
    try:
        async for result in run_cases(endpoint, cases, dialects=dialects, templates=templates):
            results.append(result)
            if time.monotonic() > next_report_s:
                next_report_s = time.monotonic() + _PROGRESS_S
                print(f"{_summarize(results)}; now {result.template}", file=sys.stderr)
    finally:
        await endpoint.close()
    return results


def _summarize(results: Sequence[CaseResult]) -> str:
    outcomes = [result.outcome for result in results]
    return f"{outcomes.count('ok')} ok, {outcomes.count('FAIL')} failed, {outcomes.count('-')} do not apply"


if __name__ == "__main__":
    sys.exit(main())
