# cython: annotation_typing=False, nonecheck=True, auto_pickle=False
"""The beginning of an established connection: when its protocol is made, and who speaks first.

Theory
------
The connecting side speaks first: iWARP demands it (rdma_connect(3)). If its program writes nothing in
connection_made(), that is a Credit.

A server by TCP makes a protocol when its kernel has long had the connection, and mostly the client's first bytes, too.
So it hardly ever sees a connection that is idle only because the client has just come. uvicorn closes idle ones when it
ends, and whoever had just connected would get no answer. With ``waits_to_hear`` the accepting side therefore makes its
protocol when the first frame has come (`begin_late`), and the connecting side leaves that frame to its program for a
few turns of the loop (`speak`). A client that says nothing has held up nobody: the server waits `FIRST_WORD_S` at most.

soft-iWARP overlooks a first frame that comes before it has finished accepting, until another one comes (rules.md). So a
client there that has heard nothing of its peer's sends it some more (`speak_again`).
"""

from __future__ import annotations

from rdmanet import credit
from rdmanet._core import CMEvent, TransportType
from rdmanet.protocol import Event, State, Writing
from rdmanet.stream.callbacks import is_buffered
from rdmanet.stream.establish import CLIENT
from rdmanet.stream.options import KEEPALIVE
from rdmanet.stream.parts import Life

# As globals: before Python 3.12 an enum takes twenty times as long to give a member.
_ESTABLISHED, _CLOSE_DUE, _OPEN = Event.ESTABLISHED, Writing.CLOSE_DUE, Writing.OPEN
_CREDIT, _PING, _IWARP = credit.Kind.CREDIT, credit.Kind.PING, TransportType.IWARP

FIRST_WORD_S = 0.05
"""How long an accepting side waits for a client's first frame. Mostly it comes at once; on a slow machine a client's
turns take some milliseconds each. uvicorn gives a server 0.1 s after it has closed what is idle: whoever comes in that
time is answered, so this is less."""
FIRST_WORD_TURNS = 4
"""For how many turns of its loop a client leaves the first frame to its program, whose tasks have to be woken."""
AGAIN_S = (0.05, 0.2, 1.0)
"""How long a client waits each time for its peer's first frame, until it speaks again to a device that may overlook."""


def established(life: Life, event: CMEvent) -> None:
    """Both sides are ready: make the protocol and tell it. Bytes may have arrived already."""
    if life.teardown.released:
        return
    life.on_made()
    if life.endpoint.role is CLIENT:
        life.endpoint.agree(credit.unpack_hello(event.private_data))
    elif life.config.waits_to_hear and not life.connection.has_heard:
        life.machine.receive(Event.ACCEPTED)
        life.deadlines.begin_first_word(FIRST_WORD_S, begin_late, life)
        return
    _begin(life)


def begin_late(life: Life) -> None:
    """The accepting side has waited for the client's first frame, which has come, or is late."""
    if life.machine.state is not State.UNHEARD or life.teardown.released or life.loop_context.foreign:
        return
    life.deadlines.end_first_word()
    try:
        _begin(life)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as exc:
        failed(life, exc)


def failed(life: Life, error: BaseException) -> None:
    """The accepting side could not begin: nobody waits for that."""
    life.callbacks.report(error, "rdmanet: a connection could not be begun")
    life.release_now()


def _begin(life: Life) -> None:
    config, connection = life.config, life.connection
    connects = life.endpoint.role is CLIENT
    assert life.endpoint.id is not None
    life.facts.learn(life.endpoint.id, connection, config.reason)
    protocol = life.callbacks.make_protocol()
    life.machine.receive(_ESTABLISHED)
    connection.open(protocol, is_buffered(protocol), connects)
    connection.keep_alive(config.keepalive is not None, *(config.keepalive or KEEPALIVE))
    close_due = life.machine.writing is _CLOSE_DUE
    if close_due:
        life.deadlines.stop()
    life.callbacks.connection_made()
    if connects:
        speak(life, FIRST_WORD_TURNS if config.waits_to_hear else 0)
        if not life.teardown.released and may_be_overlooked(life):
            life.deadlines.begin_first_word(AGAIN_S[0], speak_again, (life, 1))
    life.loop.call_soon(connection.greet)
    connection.hear_early()
    if close_due:
        life.close()


def speak(life: Life, turns: int) -> None:
    """Send a Credit, unless the program writes something within so many turns of the loop."""
    if life.teardown.released or life.connection.has_said or life.loop_context.foreign:
        return
    if turns:
        life.loop.call_soon(speak, life, turns - 1)
    else:
        life.connection.send_control(_CREDIT)


def may_be_overlooked(life: Life) -> bool:
    """Whether our device is of a kind that may overlook what a client says first: its peer's is most likely as ours."""
    if life.loop_context.library.embedded_device:
        return False
    return life.connection.engine.pd.context.transport_type is _IWARP


def speak_again(attempt: tuple[Life, int]) -> None:
    """Send another frame unless the peer has sent data; this is the so-many-th time.

    The first is a Ping if one may still go: who answers needs no others.
    """
    life, number = attempt
    life.deadlines.end_first_word()
    if life.teardown.released or life.loop_context.foreign or life.connection.stats()["frames_received"]:
        return
    if number == 1 and life.machine.writing is _OPEN:
        life.connection.send_control(_PING, bytes(credit.PING_BYTES))
    else:
        life.connection.send_control(_CREDIT)
    if number < len(AGAIN_S):
        life.deadlines.begin_first_word(AGAIN_S[number], speak_again, (life, number + 1))
