# cython: annotation_typing=False, nonecheck=True, auto_pickle=False
"""The end of a connection: when its program hears of it, and in which order everything is given back.

Theory
------
The states decide that the connection is over, and whether connection_lost() is still to be called (`Told`); this calls
it, in a turn of its own. It has to wait only where our Abort is on its way, and the peer may write to the program's
memory until it has that.

A connection of a program that expects TCP is left to the device when it is closed and everything has been posted
(`leave_to_device`): connection_lost() is called in the next turn, as over TCP, and neither abort() nor an exception
ends anything then. What the device may still touch is kept until it is done, or until a close takes too long.

``Teardown`` (teardown.py) decides when the connection is disconnected (`disconnect`) and when it gives everything back
(`steps_of_end`). If the loop ends first, nothing waits for the peer (`end_now`).
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable
from typing import Any

from rdmanet.errors import name_peer
from rdmanet.protocol import Event, State, TellingEvent, Told
from rdmanet.stream.parts import Life

# As globals: before Python 3.12 an enum takes twenty times as long to give a member.
_CLOSED, _TOLD_LOSS, _LOSS_HELD_BACK = State.CLOSED, Told.LOSS, Told.LOSS_HELD_BACK
_LEAVE, _HOLD_BACK, _LOSE_NOW = TellingEvent.LEAVE, TellingEvent.HOLD_BACK, TellingEvent.LOSE


# -- what the program hears --------------------------------------------------------------------------------


def lose(life: Life) -> None:
    """Call connection_lost(), but not before our Abort has left if the peer may write to memory until then."""
    if life.teardown.in_farewell and life.connection.lands:
        life.machine.tell(_HOLD_BACK)
    if life.machine.told is not _LOSS_HELD_BACK:
        call_connection_lost(life)


def call_connection_lost(life: Life) -> None:
    """The last callback, then the end of everything that the connection held."""
    if life.teardown.released:
        return
    tells = life.machine.tell(_LOSE_NOW)
    if life.connection.lands:  # from here on, the program's memory is its own
        life.connection.end_keys()
        life.connection.lose_landings()
    if life.known_regions is not None:
        life.known_regions.lost()  # now, though the peer may not have learned of the end yet
    try:
        if tells:
            error: Any = life.machine.error
            life.callbacks.connection_lost(error)
    finally:
        if life.readiness is not None:
            life.readiness.close()
        life.teardown.release()


def leave_to_device(life: Life) -> None:
    """Of programs that expect TCP: call connection_lost() in the next turn, if nothing is left to post.

    There the kernel has the rest then, here the device: `until_sent` (parting.py) waits for it when the loop ends. Not
    if the device uses the program's own memory.
    """
    connection = life.connection
    if connection.get_write_buffer_size() or connection.borrows_memory or connection.lands:
        return
    if life.machine.tell(_LEAVE):
        life.loop.call_soon(_lose_as_tcp, life, context=life.callbacks.context)


def _lose_as_tcp(life: Life) -> None:
    if life.machine.error is None and life.machine.tell(_LOSE_NOW):
        try:
            life.callbacks.connection_lost(None)
        finally:
            tell_over(life)  # nobody waits for the device, as nobody waits for TCP's kernel


def tell_over(life: Life) -> None:
    """The connection, or the attempt, is over for its program: say so, once."""
    on_over, life.on_over = life.on_over, _nothing
    on_over()


def _nothing() -> None:
    pass


# -- an end that waits for nobody --------------------------------------------------------------------------


def end_now(life: Life, error: Exception | None) -> None:
    """End at once, and do not wait until the peer has heard of it; connection_lost() gets this error."""
    machine = life.machine
    made = not machine.opening
    if made and machine.state is not _CLOSED and machine.error is None:
        machine.error = error
    machine.receive(Event.ABORT)
    life.connection.stop_writing()
    if made and machine.told is not _TOLD_LOSS and not life.loop.is_closed():
        life.callbacks.context.run(call_connection_lost, life)
    life.release_now()


def loop_ended(life: Life) -> None:
    """The loop ends before the connection. While the loop still runs, those who wait are told."""
    if not life.teardown.wanted:
        life.release_now()
        return
    machine, transport = life.machine, life.callbacks.transport
    unclosed, error = "", None
    made = not machine.opening and machine.state is not _CLOSED and machine.told is not _TOLD_LOSS
    if made and (not machine.closing or life.connection.undelivered):
        unclosed = f"unclosed transport {transport!r}"
        error = ConnectionAbortedError(errno.ECONNABORTED, "the event loop has ended")
        name_peer(error, life.facts.get("peername"))
    end_now(life, error)
    if unclosed:  # last, because the program may turn warnings into exceptions
        warnings.warn(unclosed, ResourceWarning, stacklevel=2, source=transport)


# -- what is given back ------------------------------------------------------------------------------------


def disconnect(life: Life) -> None:
    """End the connection, and keep what it has received until that is delivered."""
    life.endpoint.disconnect()
    if life.machine.told is _LOSS_HELD_BACK:
        life.loop.call_soon(call_connection_lost, life, context=life.callbacks.context)
    if life.machine.state is not _CLOSED:
        _keep_received(life)


def _keep_received(life: Life) -> None:
    """Give everything back but what is still to be delivered.

    Whoever waits for remote memory waits in vain now, and may be the reason why the reader is paused.
    """
    if life.known_regions is not None:
        life.known_regions.end_bindings()
    life.connection.end_keys()
    life.endpoint.destroy_queue_pair()
    life.connection.lose_operations()
    life.connection.lose_loans()
    life.connection.lose_landings()
    if life.known_regions is not None:
        life.known_regions.close()
    if not life.loop.is_closed():
        life.writing.over()


def steps_of_end(life: Life) -> list[Callable[[], None]]:
    """What gives everything back, in this order.

    The peer's keys before the queue pair that they are bound to, which is in ERR by then; the queue pair before the
    memory that it writes into; the identifier after its queue pair (rdma_destroy_id(3)); those who wait are told last.
    """
    connection, endpoint, regions = life.connection, life.endpoint, life.known_regions
    steps = [life.deadlines.stop, endpoint.disconnect]
    if regions is not None:
        steps.append(regions.end_bindings)
    steps += connection.end_keys, endpoint.destroy_queue_pair, connection.release, endpoint.destroy_id
    if regions is not None:
        steps.append(regions.close)
    if not life.loop.is_closed():
        steps.append(life.writing.over)
    if life.readiness is not None:
        steps.append(life.readiness.close)
    steps.append(life.detach)
    return steps
