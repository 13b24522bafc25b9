"""Attack live clusters as a stranger may, and judge what others notice of it.

    python -m tests.faults.hostile [--only NAME,FAMILY,...] [--brief] [--keep DIR] [--list]

Each attack gets a new cluster of three brokers with an innocent producer beside it (`harness.py`). No broker may grow
by more than 256 MiB or keep what it took, the innocent p99 may triple (or reach 50 ms), and no ZooKeeper session may
end.
`--brief` measures the quiet cluster for a shorter time. Exit code 1 unless every check of every attack passed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path

import uvloop

from minibroker.deploy.local.processes import let_signals_interrupt
from tests.faults.hostile.attacks import chosen, registered
from tests.faults.hostile.frames import report
from tests.faults.hostile.harness import judge, target_of


async def play(name: str, step: str, directory: Path, seconds: float) -> None:
    """Be the attacker."""
    attack = registered()[name]
    target = target_of(directory)
    work = attack.run if step == "attack" else attack.prepare
    assert work is not None
    print("it begins", flush=True)
    with contextlib.suppress(TimeoutError) if step == "attack" else contextlib.nullcontext():
        async with asyncio.timeout(seconds):
            await work(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME,...", help="attacks or families, with commas between them")
    parser.add_argument("--brief", action="store_true", help="measure the quiet cluster for a shorter time")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the clusters' files there, for their logs")
    parser.add_argument("--list", action="store_true", help="print the attacks")
    parser.add_argument("--play", help=argparse.SUPPRESS)
    parser.add_argument("--step", default="attack", help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    let_signals_interrupt()
    if arguments.play is not None:
        uvloop.run(play(arguments.play, arguments.step, arguments.data, arguments.seconds))
        return
    try:
        attacks = chosen(arguments.only)
    except KeyError as error:
        parser.error(error.args[0])
    if arguments.list:
        for attack in attacks:
            print(f"{attack.family:<10} {attack.name:<40} {attack.sentence}")
        return
    failed = []
    for attack in attacks:
        print(f"\n{attack.family}: {attack.name}: {attack.sentence}", flush=True)
        with tempfile.TemporaryDirectory(prefix="minibroker-hostile-", ignore_cleanup_errors=True) as temporary:
            directory = (arguments.keep or Path(temporary)) / attack.name
            directory.mkdir(parents=True, exist_ok=True)
            checks = uvloop.run(judge(attack, directory, brief=arguments.brief))
        if report(attack.name, checks):
            failed.append(attack.name)
    print(f"\n{len(attacks)} attacks, {len(failed)} of them do harm: {', '.join(failed) or 'none'}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
