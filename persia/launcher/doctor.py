"""`persia-launcher doctor`: what is wrong with this machine, the settings, or the job."""

from __future__ import annotations

from typing import Any

import click

from persia.launcher import options
from persia.launcher.options import job_options, option


@click.command("doctor")
@job_options
@options.global_config
@options.embedding_config()
@option(
    "--port",
    "ports",
    type=click.IntRange(1, 65535),
    multiple=True,
    help="A port that is to be free here, such as 8888; may be given again.",
)
@option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def command(as_json: bool, **settings: Any) -> None:
    """Check this machine, the settings and the job, and say what to do.

    Looks at Python, torch, the compiled module, environment variables, configuration files, ports, the NATS
    server, the job's processes, limits and huge pages. Ends with exit code 1 when something must be changed;
    warnings leave it 0. Changes nothing.
    """
    import json
    import sys

    from persia.launcher.doctor_checks import Level, Settings, run_checks

    colors = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}
    findings = []
    for topic, finding in run_checks(Settings(**settings)):
        # Shown at once: a later check may wait seconds for a broker that does not answer.
        findings.append((topic, finding))
        if not as_json:
            level = click.style(f"{finding.level.value:>4}", fg=colors[finding.level])
            click.echo(f"{level}  {topic:<14} {finding.what}")
            if finding.remedy:
                click.echo(f"      {'':<14} -> {finding.remedy}")
    if as_json:
        rows = [
            {"topic": topic, "level": one.level.value, "what": one.what, "remedy": one.remedy}
            for topic, one in findings
        ]
        click.echo(json.dumps(rows, indent=2))
    sys.exit(1 if any(finding.level is Level.FAIL for _, finding in findings) else 0)
