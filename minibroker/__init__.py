"""The public face of minibroker: `from minibroker import Admin, Consumer, Producer`, and the command `minibroker`.

The parts (`minibroker.broker`, `minibroker.client`, ...) are links to the folders beside this one. To import any of
them imports this module first, in brokers and controllers too, which do not need the client. Therefore the client is
imported when one of its names is first used (PEP 562). Its `__all__` is the only list of public names.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import typer

    from minibroker.client import *  # noqa: F403
    from minibroker.client import __all__ as __all__

    __version__: str


def __getattr__(name: str) -> object:
    value: object
    if name == "__version__":
        value = importlib.import_module("importlib.metadata").version("minibroker")
    else:
        public = _public_names() if name == "__all__" or not name.startswith("_") else ()
        if name == "__all__":
            value = public
        elif name in public:
            value = getattr(importlib.import_module("minibroker.client"), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _public_names() -> list[str]:
    names: list[str] = importlib.import_module("minibroker.client").__all__
    return names


def __dir__() -> list[str]:
    # The modules that this one imports are of no use to users; the parts that are imported by now are.
    found = {name for name in globals() if name.startswith("__") or f"{__name__}.{name}" in sys.modules}
    return sorted({*found, *_public_names(), "__version__"})


def application() -> typer.Typer:
    """The commands of all packages, as one application."""
    # Imported here, since a program that produces or consumes needs neither command lines nor process control.
    import typer

    from minibroker.client.cli import commands
    from minibroker.deploy import cli as launcher
    from minibroker.deploy.scenarios import cli as scenarios
    from minibroker.spark_jobs import cli as spark

    app = typer.Typer(
        name="minibroker",
        help="A small, real, replicated log broker cluster.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    # Two packages fill this group: the client has the benchmarks that only use brokers, the launcher those that kill
    # brokers.
    bench = typer.Typer(help="Measure a cluster.", no_args_is_help=True)
    launcher.mount(app, bench)
    commands.mount(app, bench)
    app.add_typer(bench, name="bench")
    scenarios.mount(app)
    spark.mount(app)
    return app


def main() -> NoReturn:
    """The command line `minibroker`. Exit codes: 0 ok, 1 failure, 2 usage, 3 timeout, 4 unhealthy."""
    try:
        from minibroker.client.cli.terminal.log import show_waits
        from minibroker.client.cli.terminal.output import run_app

        show_waits()
        code = run_app(application())
    except KeyboardInterrupt:  # during the imports
        code = 130
    sys.exit(code)
