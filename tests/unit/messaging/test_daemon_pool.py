"""The pool runs calls on a bounded number of daemon threads."""

import os
import threading
import time
import weakref

import pytest

from persia.messaging.daemon_pool import DaemonPool, lower_priority

DEADLINE_S = 60.0


def test_results_and_errors_come_back():
    pool = DaemonPool(2, "test")
    assert pool.submit(divmod, 7, 3).result(DEADLINE_S) == (2, 1)
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 1, 0).result(DEADLINE_S)
    pool.close()


def test_one_thread_keeps_the_order():
    pool = DaemonPool(1, "test")
    seen: list[int] = []
    futures = [pool.submit(seen.append, number) for number in range(100)]
    for future in futures:
        future.result(DEADLINE_S)
    assert seen == list(range(100))
    pool.close()


def test_calls_run_at_the_same_time_up_to_the_number_of_threads():
    pool = DaemonPool(3, "test")
    barrier = threading.Barrier(3)
    futures = [pool.submit(barrier.wait, DEADLINE_S) for _ in range(3)]
    assert sorted(future.result(DEADLINE_S) for future in futures) == [0, 1, 2]
    pool.close()


def test_threads_are_daemons_and_end_after_close():
    pool = DaemonPool(1, "test")
    thread = pool.submit(threading.current_thread).result(DEADLINE_S)
    assert thread.daemon
    pool.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_a_cancelled_call_does_not_run():
    pool = DaemonPool(1, "test")
    release = threading.Event()
    ran = threading.Event()
    pool.submit(release.wait, DEADLINE_S)
    waiting = pool.submit(ran.set)
    assert waiting.cancel()
    release.set()
    pool.submit(int).result(DEADLINE_S)
    assert not ran.is_set()
    pool.close()


def test_idle_threads_have_ended_when_close_returns():
    for round_number in range(50):
        pool = DaemonPool(4, f"idle-{round_number}")
        for future in [pool.submit(int) for _ in range(8)]:
            future.result(120)
        pool.close()
        assert not [t.name for t in threading.enumerate() if t.name == f"idle-{round_number}"]


@pytest.mark.parametrize("before", [0, 15])
def test_threads_that_lower_priority_pass_it_on_and_never_become_less_nice(before: int):
    def own_priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def priorities() -> tuple[int, int]:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(before, own_priority()))
        lower_priority()
        inner = DaemonPool(1, "inner")
        found = own_priority(), inner.submit(own_priority).result(DEADLINE_S)
        inner.close()
        return found

    of_process = own_priority()
    pool = DaemonPool(1, "test")
    assert pool.submit(priorities).result(DEADLINE_S) == (max(10, before, of_process),) * 2
    pool.close()
    assert own_priority() == of_process


def test_an_idle_thread_keeps_nothing_of_its_last_call():
    class Store:
        def work(self) -> None: ...

    pool, store = DaemonPool(1, "idle"), Store()
    kept = weakref.ref(store)
    pool.submit(store.work).result(DEADLINE_S)
    del store
    deadline = time.monotonic() + DEADLINE_S
    while kept() is not None:  # the thread lets it go after the result is there
        assert time.monotonic() < deadline
        time.sleep(0.001)
    pool.close()


def test_calls_after_close_have_threads_of_their_own():
    pool = DaemonPool(1, "test")
    assert pool.submit(int).result(DEADLINE_S) == 0
    pool.close()
    assert pool.submit(int, "7").result(DEADLINE_S) == 7
    pool.close()
