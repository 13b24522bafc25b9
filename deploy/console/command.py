"""`minibroker console`: serves the pages until Ctrl-C."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from minibroker.client.cli.terminal.output import (
    DEFAULT_DATA,
    BootstrapOption,
    DataOption,
    UsageError,
    bootstrap_servers,
    note,
    run,
)
from minibroker.client.settings import parse_bootstrap
from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local import console_file
from minibroker.deploy.local.faulty_cluster import FaultyCluster
from minibroker.deploy.local.ports import LOOPBACK
from minibroker.deploy.looking import view_and_status
from minibroker.deploy.observing.status import Status

DEFAULT_PORT = 8080
ENDING_WITHIN_S = 1


def console(
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port of the pages. 0: any free port.")] = DEFAULT_PORT,
    host: Annotated[
        str, typer.Option(metavar="HOST", help="Address to listen at. The pages have no password.")
    ] = LOOPBACK,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    allow_faults: Annotated[
        bool,
        typer.Option("--allow-faults", help="Add buttons that kill, pause, stop and start the cluster's processes."),
    ] = False,
) -> None:
    """Serve pages that show the cluster in a browser, live: partitions, failovers, groups, metrics, records.

    With --allow-faults, a page breaks the cluster of this machine, as `minibroker kill` and its siblings do.

    Prints the address of the pages. The cluster may be down and come back meanwhile. Ctrl-C ends it."""
    if not all(map(find_spec, ("starlette", "uvicorn"))):
        raise LaunchError(
            "the console is served by Starlette and uvicorn, which are not installed: pip install 'minibroker[console]'"
        )
    if allow_faults:
        _check_faults(bootstrap, host)
    servers = partial(bootstrap_servers, bootstrap, data, even_if_down=True)
    parse_bootstrap(servers())  # a mistake on the command line is told here, and not on the pages
    health = partial(_status, bootstrap, data)
    run(_serve(servers, data if bootstrap is None else None, host, port, allow_faults, health))


def _status(bootstrap: str | None, data: Path) -> Status:
    return view_and_status(bootstrap, data)[1]


def _check_faults(bootstrap: str | None, host: str) -> None:
    """Raises UsageError where a stranger could break the cluster, and where there is none to break."""
    if bootstrap is not None:
        raise UsageError(
            "--allow-faults breaks processes of this machine: name the cluster by --data, not by --bootstrap"
        )
    if host != "localhost" and not is_loopback(host):
        raise UsageError(
            f"--allow-faults with --host {host}: the pages have no password, so their buttons are offered at a "
            f"loopback address only, such as {LOOPBACK}"
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def _serve(
    servers: partial[str],
    files: Path | None,
    host: str,
    port: int,
    allow_faults: bool,
    health: Callable[[], Status],
) -> None:
    from minibroker.deploy.console.edge import Console, Server
    from minibroker.deploy.console.faults import Faults
    from minibroker.deploy.console.reading import Reader
    from minibroker.deploy.console.sampling import Sampler

    listening = listen(host, port)
    reader = Reader(servers, files)
    faults = Faults(FaultyCluster(files)) if allow_faults and files is not None else None
    sampler = Sampler(reader.look, files)
    server = Server(Console(reader, sampler, faults, health=health), host, ENDING_WITHIN_S)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listening.getsockname()[1]}/"
    if files is not None:
        console_file.write(files, address)
    sys.stdout.write(f"{address}\n")
    sys.stdout.flush()
    note("Ctrl-C ends the console")
    sampling = asyncio.create_task(sampler.run())
    # It ends by itself only through an error, which is raised below.
    sampling.add_done_callback(lambda _: server.stop())
    try:
        await server.serve([listening])
    finally:
        if files is not None:
            console_file.remove(files)
        sampling.cancel()
        try:
            await asyncio.wait([sampling])
        finally:
            await reader.close()
    if not sampling.cancelled():
        sampling.result()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that accepts connections. Raises LaunchError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen()
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise LaunchError(
            f"the console cannot listen at {host}:{port} ({error.strerror or error}): choose another --port, or 0"
        ) from error
    return listening
