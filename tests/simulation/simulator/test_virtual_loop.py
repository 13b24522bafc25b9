from __future__ import annotations

import asyncio
import gc
import signal
import threading
import weakref

import pytest

from minibroker.deploy.simulator.loop import Stuck, VirtualLoop, on_virtual_loop, run
from minibroker.deploy.simulator.ownership import ProcessKilled
from minibroker.deploy.simulator.process import Process
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from tests.running import run_by


def _loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def test_sleeping_takes_only_virtual_time() -> None:
    async def main() -> list[float]:
        times = [_loop().time()]
        for seconds in (0.25, 3000.0):
            await asyncio.sleep(seconds)
            times.append(_loop().time())
        return times

    assert run(main()) == [0.0, 0.25, 3000.25]


def test_timers_of_one_moment_fire_in_the_order_of_their_creation() -> None:
    async def main() -> list[int]:
        fired: list[int] = []
        for number in range(20):
            _loop().call_at(1.0, fired.append, number)
        await asyncio.sleep(1)
        return fired

    assert run(main()) == list(range(20))


def test_cancelled_timers_do_not_fire_and_do_not_pile_up() -> None:
    async def main() -> int:
        fired: list[int] = []
        for number in range(10_000):
            _loop().call_later(50, fired.append, number).cancel()
        kept = len(_loop()._timers)
        _loop().call_later(10, fired.append, -1)
        await asyncio.sleep(100)
        assert fired == [-1]
        assert _loop().time() == 100
        return kept

    assert run(main()) < 2_000


def test_timeouts_work() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        return _loop().time()

    assert run(main()) == 5.0


def test_a_deadlock_is_an_error_that_names_the_line() -> None:
    async def waits_for_ever() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.create_task(waits_for_ever(), name="the one that waits")

    with pytest.raises(Stuck, match=r"everything waits") as caught:
        run(main())
    assert "the one that waits of the test in Event.wait (" in str(caught.value)


def test_a_program_that_only_yields_is_an_error() -> None:
    async def main() -> None:
        def again() -> None:
            _loop().call_soon(again)

        again()
        await asyncio.Event().wait()

    with pytest.raises(Stuck, match="time has stood still"):
        run(main())


def test_the_virtual_time_limit_ends_an_endless_program() -> None:
    async def main() -> None:
        def again() -> None:
            _loop().call_later(1, again)

        again()
        await asyncio.Event().wait()

    with pytest.raises(Stuck, match="60 virtual seconds"):
        run(main(), limit_s=60)


def test_functions_in_the_executor_run_inline_in_their_own_turn() -> None:
    async def main() -> list[str]:
        order: list[str] = []

        def work(name: str) -> str:
            order.append(name)
            return name.upper()

        first = _loop().run_in_executor(None, work, "first")
        second = asyncio.ensure_future(asyncio.to_thread(work, "second"))
        order.append("called")
        assert await first == "FIRST"
        assert await second == "SECOND"

        def fail() -> None:
            raise ValueError(threading.current_thread().name)

        with pytest.raises(ValueError, match=threading.main_thread().name):
            await _loop().run_in_executor(None, fail)
        return order

    assert run(main()) == ["called", "first", "second"]


def test_a_function_in_the_executor_runs_although_its_caller_was_cancelled() -> None:
    async def main() -> list[int]:
        done: list[int] = []
        task = asyncio.create_task(asyncio.to_thread(done.append, 1))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return done

    assert run(main()) == [1]


def test_calls_from_threads_are_rejected() -> None:
    async def main() -> list[Exception]:
        errors: list[Exception] = []
        loop = _loop()

        def intrude() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
        return errors

    assert len(run(main())) == 1


def test_an_unawaited_task_that_fails_fails_the_run() -> None:
    async def fail() -> None:
        raise ValueError("unseen")

    async def main() -> None:
        task = asyncio.create_task(fail())
        await asyncio.sleep(1)
        del task

    with pytest.raises(ExceptionGroup) as caught:
        run(main())
    assert [str(error) for error in caught.value.exceptions] == ["unseen"]


def test_a_callback_that_fails_fails_the_run() -> None:
    async def main() -> None:
        _loop().call_soon(int, "x")
        await asyncio.sleep(1)

    with pytest.raises(ExceptionGroup):
        run(main())


def test_the_tests_own_tasks_are_cancelled_at_the_end() -> None:
    ended: list[str] = []

    async def linger() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(3)
            ended.append("after three seconds")

    async def main() -> None:
        tasks.append(asyncio.create_task(linger()))
        await asyncio.sleep(0)

    tasks: list[asyncio.Task[None]] = []
    run(main())
    assert ended == ["after three seconds"]


def test_the_order_of_a_set_of_tasks_does_not_depend_on_their_addresses() -> None:
    async def main() -> list[str]:
        tasks = {asyncio.create_task(asyncio.sleep(0), name=str(number)) for number in range(1_000)}
        await asyncio.wait(tasks)
        return [task.get_name() for task in tasks]

    first = run(main())
    elsewhere = [object() for _ in range(12_345)]
    assert run(main()) == first
    assert elsewhere


def test_callbacks_of_a_killed_process_do_not_run() -> None:
    async def main() -> list[str]:
        ran: list[str] = []
        process = Process(_loop(), "victim", "10.0.0.1")

        async def program() -> None:
            _loop().call_later(2, ran.append, "a timer")
            child = asyncio.create_task(tick("a child"))
            try:
                await tick("the program")
            finally:
                ran.append("a finally block")
                await child

        async def tick(name: str) -> None:
            while True:
                await asyncio.sleep(0.6)
                ran.append(f"{name} at {_loop().time():.1f}")

        process.start(program())
        await asyncio.sleep(1)
        process.kill()
        await asyncio.sleep(10)
        gc.collect()
        return list(ran)

    assert run(main()) == ["the program at 0.6", "a child at 0.6"]


def test_suspended_tasks_of_a_killed_process_stay_suspended_until_the_run_ends() -> None:
    ended: list[str] = []

    async def main() -> None:
        process = Process(_loop(), "victim", "10.0.0.1")

        async def program() -> None:
            asyncio.create_task(wait())  # noqa: RUF006 - only the event that it waits for refers to it

        async def wait() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("wait")

        process.start(program())
        await asyncio.sleep(1)
        process.kill()
        gc.collect()
        assert not ended

    run(main())
    assert ended == ["wait"]


def test_burying_tasks_creates_no_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a loop would be collected during a later test, together with the coroutines that wait in it."""
    made: list[object] = []
    monkeypatch.setattr(asyncio.DefaultEventLoopPolicy, "new_event_loop", lambda policy: made.append(policy))
    asyncio.set_event_loop_policy(None)  # a new policy, which creates a loop at the first request

    async def stop() -> None:
        try:
            await asyncio.sleep(1_000)
        finally:
            await asyncio.gather(asyncio.sleep(1), asyncio.sleep(2))

    async def main() -> None:
        process = Process(_loop(), "victim", "10.0.0.1")
        process.start(stop())
        await asyncio.sleep(1)
        process.kill()

    run(main())
    gc.collect()
    assert not made


def test_garbage_of_a_run_is_collected_before_the_next_one() -> None:
    """Thousands of runs share a worker process of pytest."""
    tasks: list[weakref.ref[asyncio.Task[None]]] = []

    async def main() -> list[object]:
        task = asyncio.create_task(asyncio.sleep(1))
        tasks.append(weakref.ref(task))
        await task
        left: list[object] = [task]
        left.append(left)
        return left

    for _ in range(3):
        run(main())  # its caller holds the rest until it returns
    run(asyncio.sleep(1))
    assert [task() for task in tasks] == [None] * 3


class _TooSlow(BaseException):
    pass


@pytest.mark.parametrize("ends", [True, False], ids=["callbacks end", "one does not"])
def test_an_alarm_ends_the_run_whichever_task_it_interrupts(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minibroker.deploy.simulator.loop._ALARM_AGAIN_S", 0.01)
    interrupted: list[BaseException] = []

    async def work() -> None:
        try:
            signal.raise_signal(signal.SIGALRM)
            while not ends:
                pass
        except BaseException as error:
            interrupted.append(error)
            raise

    async def main() -> None:
        process = Process(_loop(), "program", "10.0.0.1")
        process.start(work())
        await asyncio.sleep(1)

    def ring(number: int, frame: object) -> None:
        raise _TooSlow

    before = signal.getsignal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, ring)
    try:
        with pytest.raises(_TooSlow):
            run(main())
        assert signal.getsignal(signal.SIGALRM) is ring
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert bool(interrupted) is not ends


def test_time_does_not_stop_at_the_timers_of_killed_processes() -> None:
    async def main() -> None:
        process = Process(_loop(), "victim", "10.0.0.1")
        process.start(asyncio.sleep(5))
        await asyncio.sleep(1)
        process.kill()
        await asyncio.Event().wait()

    with pytest.raises(Stuck, match=r"at 1\.0+ s everything waits"):
        run(main())


@run_by(on_virtual_loop)
async def test_waiting_for_a_process_raises_process_killed_after_its_kill() -> None:
    process = Process(_loop(), "victim", "10.0.0.1")
    assert await process.run(asyncio.sleep(1, "result")) == "result"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await process.run(asyncio.sleep(10))
    _loop().call_later(1, process.kill)
    with pytest.raises(ProcessKilled, match="victim"):
        await process.run(asyncio.sleep(10))
    with pytest.raises(ProcessKilled):
        process.start(asyncio.sleep(0))


def test_a_process_can_kill_itself() -> None:
    async def main() -> list[str]:
        ran: list[str] = []
        process = Process(_loop(), "victim", "10.0.0.1")

        async def program() -> None:
            asyncio.create_task(asyncio.sleep(0)).add_done_callback(lambda _: ran.append("never"))
            process.kill()
            ran.append("the rest of the instruction")
            await asyncio.sleep(0)
            ran.append("never")

        process.start(program())
        await asyncio.sleep(1)
        return ran

    assert run(main()) == ["the rest of the instruction"]


def test_a_paused_process_stands_still_and_continues_in_order() -> None:
    async def main() -> list[str]:
        ran: list[str] = []
        process = Process(_loop(), "victim", "10.0.0.1")
        answer: asyncio.Future[None] = _loop().create_future()

        async def program() -> None:
            _loop().call_later(2, ran.append, "two seconds")
            _loop().call_later(3, ran.append, "three seconds")
            await answer
            ran.append("the answer")
            await asyncio.sleep(0)
            ran.append("and what follows")

        process.start(program())
        await asyncio.sleep(1)
        process.pause()
        process.pause()
        assert process.paused
        answer.set_result(None)
        await asyncio.sleep(9)
        assert ran == []
        process.resume()
        process.resume()
        await asyncio.sleep(1)
        assert _loop().time() == 11
        return ran

    for seed in range(5):
        ran = run(main(), seed=seed)
        assert [what for what in ran if "seconds" in what] == ["two seconds", "three seconds"]
        assert [what for what in ran if "seconds" not in what] == ["the answer", "and what follows"]
        assert ran[0] == "the answer"  # it was ready before the timers came due


def test_a_paused_process_that_is_killed_never_continues() -> None:
    async def main() -> list[str]:
        ran: list[str] = []
        process = Process(_loop(), "victim", "10.0.0.1")

        async def program() -> None:
            _loop().call_later(8, ran.append, "a timer")
            try:
                await asyncio.sleep(2)
            finally:
                ran.append("woke up")

        process.start(program())
        await asyncio.sleep(1)
        process.pause()
        await asyncio.sleep(5)
        process.kill()
        process.resume()
        assert not process.running
        await asyncio.sleep(5)
        gc.collect()
        return list(ran)

    assert run(main()) == []


# --- Shuffling ----------------------------------------------------------------------------------------------------


def test_a_clock_jump_advances_only_the_timers_of_its_process() -> None:
    async def main() -> list[str]:
        loop = _loop()
        simulation = Simulation()
        suspended, other = (simulation.host(name).start_process() for name in ("suspended", "other"))
        said: list[str] = []

        async def say(world: VirtualWorld, *delays_s: float) -> None:
            async with asyncio.TaskGroup() as tasks:
                for delay_s in delays_s:
                    tasks.create_task(say_after(world, delay_s))

        async def say_after(world: VirtualWorld, delay_s: float) -> None:
            began_s = world.clock.monotonic()
            await asyncio.sleep(delay_s)
            assert world.clock.monotonic() == loop.time() >= began_s + delay_s
            said.append(f"{world.process.name} {delay_s:g} at {loop.now_s:.1f}")

        tasks = [world.process.start(say(world, 50, 20, 200)) for world in (suspended, other)]
        await asyncio.sleep(10)
        loop.jump(suspended.process, 100)
        assert suspended.clock.monotonic() == pytest.approx(110)
        assert other.clock.monotonic() == loop.time() == pytest.approx(10)
        late = suspended.process.start(say(suspended, 5))
        await asyncio.wait([*tasks, late])
        return said

    assert run(main()) == [
        "suspended#1 20 at 10.0",
        "suspended#1 50 at 10.0",
        "suspended#1 5 at 15.0",
        "other#1 20 at 20.0",
        "other#1 50 at 50.0",
        "suspended#1 200 at 100.0",
        "other#1 200 at 200.0",
    ]


@run_by(on_virtual_loop)
async def test_a_clock_jump_changes_neither_speed_nor_order_of_a_connection() -> None:
    simulation = Simulation()
    simulation.network.set_bandwidth(10_000)
    server, client = (simulation.host(name).start_process() for name in ("server", "client"))
    received = bytearray()
    done = asyncio.Event()

    class Server(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            received.extend(data)
            if len(received) == 10_000:
                done.set()

    attaching = []
    listener = await server.network.listen("server", 1)
    listener.start(lambda incoming: attaching.append(asyncio.ensure_future(incoming.attach(Server))))

    async def send() -> None:
        transports: list[asyncio.WriteTransport] = []

        class Client(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                assert isinstance(transport, asyncio.WriteTransport)
                transports.append(transport)

        await client.network.connect("server", 1, Client)
        transports[0].write(bytes(range(250)) * 20)
        await asyncio.sleep(0)
        simulation.loop.jump(client.process, 86_400)
        transports[0].write(bytes(range(250)) * 20)

    await client.process.run(send())
    await done.wait()
    assert received == bytes(range(250)) * 40
    assert simulation.loop.now_s < 2


def test_tasks_that_wake_up_together_are_shuffled_by_the_seed() -> None:
    async def main() -> list[int]:
        order: list[int] = []
        start = asyncio.Event()

        async def wait(number: int) -> None:
            await start.wait()
            order.append(number)

        tasks = [asyncio.create_task(wait(number)) for number in range(10)]
        await asyncio.sleep(1)
        start.set()
        await asyncio.gather(*tasks)
        return order

    assert run(main(), seed=1) == list(range(10))
    orders = [run(main(), seed=seed, shuffle=True) for seed in (1, 2, 1)]
    assert orders[0] == orders[2] != orders[1]
    assert all(sorted(order) == list(range(10)) != order for order in orders)


def test_shuffling_keeps_the_promises_of_asyncio() -> None:
    async def main() -> list[str]:
        order: list[str] = []

        async def begin(name: str, signal: asyncio.Future[None] | None = None) -> None:
            order.append(f"{name} begins")
            if signal is not None:
                await signal
                order.append(f"{name} wakes up")

        async def yield_once(signal: asyncio.Future[None]) -> None:
            await signal
            order.append("one yields")
            await asyncio.sleep(0)
            order.append("and goes on last")

        signals: list[asyncio.Future[None]] = [_loop().create_future() for _ in range(4)]
        tasks = [asyncio.create_task(begin(name, signals[0])) for name in ("a", "b")]
        tasks.append(asyncio.create_task(begin("c", signals[1])))
        tasks.append(asyncio.create_task(yield_once(signals[2])))
        await asyncio.sleep(1)
        signals[0].set_result(None)
        _loop().call_soon(order.append, "callback 1")
        signals[1].set_result(None)
        _loop().call_soon(order.append, "callback 2")
        tasks += [asyncio.create_task(begin(name)) for name in ("d", "e")]
        _loop().call_soon(signals[2].set_result, None)
        await asyncio.gather(*tasks)
        return order

    orders = {tuple(run(main(), seed=seed, shuffle=True)) for seed in range(20)}
    common = ("callback 1", "c wakes up", "callback 2", "d begins", "e begins", "one yields", "and goes on last")
    assert orders == {
        ("a begins", "b begins", "c begins", *first, *common)
        for first in (("a wakes up", "b wakes up"), ("b wakes up", "a wakes up"))
    }


@run_by(on_virtual_loop)
async def test_failures_of_a_killed_process_do_not_fail_the_run() -> None:
    process = Process(_loop(), "victim", "10.0.0.1")

    async def fail() -> None:
        process.kill()
        process.check()

    process.start(fail())
    await asyncio.sleep(1)


def test_equal_programs_have_equal_traces_and_others_differ() -> None:
    async def main(delay_s: float) -> str:
        async def step() -> None:
            await asyncio.sleep(delay_s)

        await asyncio.gather(*(step() for _ in range(5)))
        return _loop().trace

    assert run(main(1)) == run(main(1))
    assert run(main(1)) != run(main(2))
