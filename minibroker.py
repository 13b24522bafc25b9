"""The public face of minibroker."""

from __future__ import annotations

from typing import NoReturn


def main() -> NoReturn:
    """The command line `minibroker`: every package's commands as one."""
    import sys

    # Imported here alone: a program that produces or consumes needs neither command lines nor process control.
    import typer

    import deploy.cli
    from client.cli.output import run_app

    app = typer.Typer(
        name="minibroker",
        help="A small, real, replicated log broker cluster.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    deploy.cli.mount(app)
    sys.exit(run_app(app))


if __name__ == "__main__":
    main()
