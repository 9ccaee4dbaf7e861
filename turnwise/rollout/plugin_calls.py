"""Running code that is not ours: it can be stopped, and whatever it raises becomes an ordinary error.

Tools and simulated users may hang, swallow cancellation, call `sys.exit` or block. Each call runs in a task or a thread
of its own, so that the episode can go on without it.
"""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from turnwise.errors import EpisodeError, PluginError

T = TypeVar("T")

GRACE_SECONDS = 5.0
"""How long cancelled code may take to clean up before it is left behind."""
MAX_LEAKED = 256


class PluginCallError(Exception):
    """What must not pass through an event loop as it is: SystemExit, a cancellation nobody asked for and the like."""


class TookTooLong(Exception):
    """The time given to a call has passed; not to be mistaken for a TimeoutError of the code itself."""


_leaked: list[threading.Thread | asyncio.Task[Any]] = []


async def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function of either kind: a coroutine as it is, anything else in a thread, where it may block.

    To be used inside `in_task`, which can stop either.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    value = await in_thread(lambda: function(*args, **kwargs))
    return await value if inspect.isawaitable(value) else value


async def in_task(work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
    """Await in a task of its own. Cancellation is passed on; code that ignores it is left behind after a while."""
    loop = asyncio.get_running_loop()
    task, waiter = loop.create_task(guarded(work)), loop.create_future()

    def wake(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    task.add_done_callback(wake)
    timer = None if seconds is None else loop.call_later(seconds, wake)
    try:
        await waiter
    except asyncio.CancelledError:
        await _stop(task)
        raise
    finally:
        if timer is not None:
            timer.cancel()
    if not task.done():
        await _stop(task)
        raise TookTooLong
    if task.cancelled():
        raise PluginCallError("CancelledError: it cancelled itself")
    return task.result()


async def in_thread(work: Callable[[], T]) -> T:
    """Run blocking work in a daemon thread of its own: a shared pool would fill up with hung calls."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def body() -> None:
        value: Any = None
        error: Exception | None = None
        try:
            value = work()
        except BaseException as raised:  # carried to the awaiting task, whatever it is
            error = _ordinary(raised)
        try:
            loop.call_soon_threadsafe(_settle, future, value, error)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    thread = threading.Thread(target=body, daemon=True, name="turnwise-plugin")
    try:
        thread.start()
    except RuntimeError as error:
        raise EpisodeError(f"cannot start a thread: {error}") from error
    try:
        return await future
    finally:
        if not future.done() or future.cancelled():
            _leaked.append(thread)


async def guarded(work: Awaitable[T]) -> T:
    """Await; what would bring the event loop down is raised as an ordinary error."""
    try:
        return await work
    except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise  # ours, the person's at the keyboard, the interpreter's
    except Exception:
        raise
    except BaseException as error:
        raise _ordinary(error) from error


def check_leaked() -> None:
    """To be asked before a call that may hang: too many of them end the run visibly instead of slowing it to death."""
    if len(_leaked) < MAX_LEAKED:
        return
    _leaked[:] = [
        entry for entry in _leaked if (entry.is_alive() if isinstance(entry, threading.Thread) else not entry.done())
    ]
    if len(_leaked) >= MAX_LEAKED:
        raise PluginError(f"{MAX_LEAKED} calls of tools or users still run after their timeout")


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Finish, however often the caller is cancelled meanwhile; the cancellation is passed on afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen: the cancellation is what the caller must know
        raise cancelled
    return task.result()


def _ordinary(error: BaseException) -> Exception:
    """The error, or what can be raised in its place; a future cannot even hold a StopIteration."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    ordinary = PluginCallError(f"{type(error).__name__}: {error}")
    ordinary.__cause__ = error
    return ordinary


def _settle(future: "asyncio.Future[Any]", value: Any, error: Exception | None) -> None:
    if future.done():
        return  # the caller has left
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


async def _stop(task: asyncio.Task[Any]) -> None:
    """Cancel and wait; a task that goes on is left behind. More cancellations do not shorten its clean-up."""
    task.cancel()
    deadline = asyncio.get_running_loop().time() + GRACE_SECONDS
    cancelled: asyncio.CancelledError | None = None
    while not task.done() and (left := deadline - asyncio.get_running_loop().time()) > 0:
        try:
            await asyncio.wait((task,), timeout=left)
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.done():
        _leaked.append(task)
        asyncio._unregister_task(task)  # else the end of the run would wait for it
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    elif not task.cancelled():
        task.exception()  # seen: it has been stopped, what it says now is not asked for
    if cancelled is not None:
        raise cancelled
