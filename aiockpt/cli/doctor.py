"""``aiockpt doctor``: what limits this machine, and what to set."""

from __future__ import annotations

import argparse
import json

from aiockpt.cli.options import Commands
from aiockpt.cli.text import printable

__all__ = ["configure", "run"]


def configure(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "doctor",
        help="say what limits transfers on this machine",
        description="Say what limits transfers on this machine, measured for a few "
        "seconds, and what to set: a line marked with ! has a remedy below. It changes "
        "nothing. Speeds of other hosts and of the way to them are measured by "
        "aiockpt bench --url.",
    )
    parser.add_argument(
        "--json", action="store_true", help="print everything as one JSON object"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print."""
    from aiockpt.bench.machine import describe_machine
    from aiockpt.doctor import as_json, as_text, examine

    findings = examine()
    if arguments.json:
        print(json.dumps(as_json(describe_machine(), findings)))
        return 0
    for line in as_text(findings).splitlines():
        print(printable(line))
    return 0
