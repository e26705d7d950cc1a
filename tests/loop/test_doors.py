"""A door is believed only if it speaks for the TCP listener that a client would reach."""

import asyncio
import errno
import os
import socket

import pytest

from rdmanet.loop import choice, doors, kernel
from rdmanet.loop.choice import Chance, Chooser
from rdmanet.loop.doors import Answer, Door, Found
from rdmanet.loop.peers import Peers
from tests.support.descriptors import descriptors_left
from tests.support.waiting import begin, readable, until_seen

DOOR = 4711


class Answers:
    """What a door says that is in the same process as the TCP listener."""

    def __init__(self, listener: socket.socket, port: int = 0) -> None:
        self.port = port or port_of(listener)
        self.descriptor = listener.fileno()
        self.inode = os.fstat(self.descriptor).st_ino

    def __call__(self) -> Answer:
        return Answer(self.port, self.descriptor, self.inode)


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def port_of(listener: socket.socket) -> int:
    return listener.getsockname()[1]


async def opened(listener: socket.socket, address: str = "127.0.0.1") -> Door:
    door = Door(address, port_of(listener), Answers(listener, DOOR))
    door.open(asyncio.get_running_loop())
    return door


async def knock(found: Found | str) -> int:
    assert isinstance(found, Found), found
    place = await doors.knock(found, asyncio.get_running_loop())
    return place.port


async def test_it_answers_with_a_port(listener):
    port = port_of(listener)
    assert doors.find("127.0.0.1", port) is doors.NOBODY
    door = await opened(listener)
    found = doors.find("127.0.0.1", port)
    assert isinstance(found, Found) and (found.speaker.pid, found.speaker.user) == (os.getpid(), os.geteuid())
    assert await knock(found) == DOOR
    assert await asyncio.gather(*(knock(doors.find("127.0.0.1", port)) for _ in range(200))) == [DOOR] * 200
    door.close()
    assert doors.find("127.0.0.1", port) is doors.NOBODY


async def test_without_a_sign_nobody_knocks(listener):
    """A sign is what costs a client least to look for, so a server has one as long as it has a door."""
    port, lookout = port_of(listener), doors.Lookout()
    signs = doors.signs("127.0.0.1", port)
    assert not lookout.sees(signs)
    door = await opened(listener)
    assert lookout.sees(signs) and not lookout.sees(doors.signs("127.0.0.2", port))
    door.close()
    assert not lookout.sees(signs)
    with socket.socket(socket.AF_UNIX) as unsigned:
        unsigned.bind(signs[0])
        unsigned.listen()
        assert doors.find("127.0.0.1", port, lookout) is doors.NOBODY
        unsigned.setblocking(False)
        with pytest.raises(BlockingIOError):
            unsigned.accept()
    lookout.close()


async def test_a_sign_alone_says_nothing(listener):
    """Everybody may put one up. Who sees it looks for the door, and goes by TCP if there is none."""
    port = port_of(listener)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.bind(doors.signs("127.0.0.1", port)[0])
        assert doors.find("127.0.0.1", port) is doors.NOBODY
        with pytest.raises(OSError, match="in use"):
            Door("127.0.0.1", port, Answers(listener))
        assert doors.owner("127.0.0.1", port) is None


async def test_a_sign_that_cannot_be_looked_at_is_one(listener):
    """Its peer is somebody else, so the kernel says EPERM: that is not what it says of nobody."""
    port, lookout = port_of(listener), doors.Lookout()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.bind(doors.signs("127.0.0.1", port)[0])
        stranger.connect(stranger.getsockname())
        assert lookout.sees(doors.signs("127.0.0.1", port))
    lookout.close()


async def test_nothing_can_be_left_in_a_sign(listener):
    door = await opened(listener)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.connect(doors.signs("127.0.0.1", port_of(listener))[0])
        for send in (stranger.send, lambda what: socket.send_fds(stranger, [what], [0])):
            with pytest.raises(BrokenPipeError):
                send(b"x")
    door.close()


async def test_a_listener_of_both_families_has_a_sign_for_each():
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as everywhere:
        port = port_of(everywhere)
        door = Door("::", port, Answers(everywhere, DOOR), takes_both=True)
        door.open(asyncio.get_running_loop())
        for address in ("127.0.0.1", "::1"):
            assert await knock(doors.find(address, port)) == DOOR
        door.close()


async def test_without_a_listener_it_is_not_believed():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        door = await opened(bound)
        assert "no TCP listener" in doors.find("127.0.0.1", port_of(bound))
        door.close()


async def test_of_another_address_it_is_not_believed(listener):
    """A wildcard's door does not speak for the listener that an address of its own has."""
    door = await opened(listener, "0.0.0.0")
    assert "TCP connections go to 127.0.0.1" in doors.find("127.0.0.1", port_of(listener))
    door.close()


async def test_for_another_user_it_is_not_believed(listener, monkeypatch):
    door = await opened(listener)
    theirs = kernel.Listener(os.geteuid() + 1, "127.0.0.1", 1)
    monkeypatch.setattr(kernel, "tcp_listener", lambda address, port: theirs)
    assert f"user {os.geteuid() + 1}'s" in doors.find("127.0.0.1", port_of(listener))
    door.close()


async def test_a_user_who_may_be_anybody_is_not_believed(listener, monkeypatch):
    door = await opened(listener)
    monkeypatch.setattr(kernel, "overflow_user", os.geteuid)
    assert "every user without a name" in doors.find("127.0.0.1", port_of(listener))
    door.close()


async def test_for_another_host_it_is_not_believed():
    """The kernel says that a listener on a wildcard has every address, also those of other hosts."""
    with socket.create_server(("0.0.0.0", 0)) as everywhere:
        door = await opened(everywhere, "0.0.0.0")
        assert isinstance(found := doors.find("127.0.0.1", port_of(everywhere)), Found)
        found.socket.close()
        assert "the address is not" in doors.find("192.0.2.77", port_of(everywhere))
        door.close()


async def test_a_name_has_one_owner(listener):
    door = await opened(listener)
    with pytest.raises(OSError, match="in use"):
        Door("127.0.0.1", port_of(listener), Answers(listener))
    door.close()


async def test_who_does_not_answer_is_given_up(listener, monkeypatch):
    monkeypatch.setattr(doors, "PATIENCE_S", 0.05)
    door = Door("127.0.0.1", port_of(listener), Answers(listener))
    with pytest.raises(doors.SilentError, match="did not answer") as failed:
        await knock(doors.find("127.0.0.1", port_of(listener)))
    # The knock stays, and will be answered.
    door.open(asyncio.get_running_loop())
    with failed.value.knock as knocking:
        await readable(knocking.fileno())
        assert knocking.recv(100).startswith(b"rdmanet-stream ")
    door.close()


async def test_who_answers_others_is_not_given_up(listener, monkeypatch):
    """Many knock, and one must wait."""
    monkeypatch.setattr(doors, "PATIENCE_S", 0.05)
    port = port_of(listener)
    door = Door("127.0.0.1", port, Answers(listener, DOOR))
    [knocking] = await begin(knock(doors.find("127.0.0.1", port)))
    looked: list[float] = []
    original = doors.has_turned

    def has_turned(address: str, port: int, since: float) -> bool:
        looked.append(since)
        doors.saw_turn(address, port)
        return original(address, port, since)

    monkeypatch.setattr(doors, "has_turned", has_turned)
    await until_seen(lambda: len(looked) == 3)
    door.open(asyncio.get_running_loop())
    assert await knocking == DOOR
    door.close()


async def test_an_answer_that_is_there_is_taken_however_late_the_loop_is(listener, monkeypatch):
    monkeypatch.setattr(doors, "PATIENCE_S", 0.001)
    loop = asyncio.get_running_loop()
    door = Door("127.0.0.1", port_of(listener), Answers(listener))
    [knocking] = await begin(knock(doors.find("127.0.0.1", port_of(listener))))
    caller, _ = door._socket.accept()
    began = loop.time()
    caller.send(b"rdmanet-stream 2 %d %d 0\n" % (port_of(listener), listener.fileno()))
    caller.close()
    while loop.time() < began + 0.01:
        pass  # the loop does not turn
    assert await knocking == port_of(listener)
    door.close()


async def test_it_names_workers_that_are_busy(listener):
    door = Door("127.0.0.1", port_of(listener), lambda: Answers(listener)()._replace(busy=range(1001, 1101)))
    door.open(asyncio.get_running_loop())
    place = await doors.knock(doors.find("127.0.0.1", port_of(listener)), asyncio.get_running_loop())
    assert place.busy == set(range(1001, 1065))
    door.close()


async def knock_and_hear(listener, answer: bytes) -> None:
    """Knock at a door that gives this answer."""
    loop = asyncio.get_running_loop()
    door = Door("127.0.0.1", port_of(listener), Answers(listener))
    found = doors.find("127.0.0.1", port_of(listener))
    caller, _ = await loop.sock_accept(door._socket)
    caller.send(answer)
    caller.close()
    try:
        await knock(found)
    finally:
        door.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0\n",
        b"rdmanet-stream 2 1\n",
        b"rdmanet-stream 2 0 1 1\n",
        b"rdmanet-stream 2 x 1 1\n",
        b"rdmanet-stream 2 1 1 0\n",
        b"rdmanet-stream 2\n",
        b"rdmanet-stream 1\n",
        b"rdmanet-stream 1234567890 1 1 1\n",
        b"x" * 200,
    ],
)
async def test_other_answers_are_errors(listener, answer):
    with pytest.raises(ConnectionResetError, match="door"):
        await knock_and_hear(listener, answer)


@pytest.mark.parametrize("answer", [b"rdmanet-stream 1 1 1 1\n", b"rdmanet-stream 3 in words\n"])
async def test_a_door_of_another_version(listener, answer):
    its = int(answer.split()[1])
    with pytest.raises(ConnectionResetError, match=f"door speaks version {its}, this side speaks version 2;"):
        await knock_and_hear(listener, answer)


async def test_a_forked_child_does_not_keep_it_open(listener):
    door = await opened(listener)
    says, told = os.pipe()
    ends, over = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(told, b"!")
        os.close(over)
        os.read(ends, 1)
        os._exit(0)
    os.read(says, 1)
    door.close()
    assert doors.find("127.0.0.1", port_of(listener)) is doors.NOBODY
    await knock_at_a_new_one(listener)
    for fd in (says, told, ends, over):
        os.close(fd)
    os.waitpid(child, 0)


async def knock_at_a_new_one(listener: socket.socket) -> None:
    door = await opened(listener)
    assert await knock(doors.find("127.0.0.1", port_of(listener))) == DOOR
    door.close()


@pytest.mark.parametrize("left", range(3))
async def test_no_descriptor_to_look_with_is_no_answer(listener, left, monkeypatch):
    """It takes one for the sign, one for the door, and one to ask the kernel. TCP is taken, which may take one, too."""
    door = await opened(listener)
    chooser = Chooser(Peers("*"))
    monkeypatch.setattr(choice, "DESCRIPTORS_LEAST", 0)
    with descriptors_left(left):
        with pytest.raises(OSError) as failed:
            doors.find("127.0.0.1", port_of(listener))
        assert failed.value.errno == errno.EMFILE
        assert chooser.choose("127.0.0.1", ("127.0.0.1", port_of(listener))) == (
            "no descriptor is left to look for an RDMA server on this host"
        )
    chance = chooser.choose("127.0.0.1", ("127.0.0.1", port_of(listener)))
    assert isinstance(chance, Chance)
    chance.door.socket.close()
    chooser.close()
    door.close()
