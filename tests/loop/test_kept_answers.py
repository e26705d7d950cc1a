"""What a door has said to one connection is good for the next ones, but only as long as it would say the same."""

import asyncio
import os
import socket
from typing import Any

import pytest
from loop_harness import Echo, Recorder, fabric, plain_server, serving

import rdmanet
from rdmanet.loop import choice, connecting, doors, inquiry, kernel, trust, workers
from rdmanet.loop.doors import Answer, Door
from rdmanet.stream import addresses, loop_context
from tests.support.waiting import until_seen


@pytest.fixture
def knocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ports at whose doors this process knocks to connect. Answers are kept for long, and nobody asks again who
    waits for a connection: on a busy machine that may take long."""
    knock, ports = doors.knock, []

    def count(found: doors.Found, loop: asyncio.AbstractEventLoop) -> Any:
        ports.append(found.port)
        return knock(found, loop)

    monkeypatch.setattr(doors, "knock", count)
    monkeypatch.setattr(choice, "KEPT_S", 1000.0)
    monkeypatch.setattr(inquiry, "ASK_S", 1000.0)
    return ports


async def reached(port: int, host: str = "127.0.0.1") -> str:
    """By which fabric a connection was made, that carries bytes."""
    transport, protocol = await asyncio.get_running_loop().create_connection(Recorder, host, port)
    by = fabric(transport)
    transport.write(b"x")
    await protocol.until(lambda: protocol.data)
    transport.close()
    return by


async def test_one_knock_is_for_many_connections(knocks: list[int]) -> None:
    async with serving() as (_, port):
        assert [await reached(port) for _ in range(5)] == ["rdma"] * 5
        assert knocks == [port]


async def test_answers_get_old(knocks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "KEPT_S", -1.0)
    async with serving() as (_, port):
        assert [await reached(port) for _ in range(3)] == ["rdma"] * 3
        assert knocks == [port] * 3


async def test_one_asks_for_all_who_connect_at_once(
    knocks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "KEPT_S", -1.0)
    async with serving() as (_, port):
        assert await asyncio.gather(*(reached(port) for _ in range(20))) == ["rdma"] * 20
        assert knocks == [port]


async def test_who_waits_for_anothers_answer_asks_when_that_one_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    knock, knocked = doors.knock, []

    async def first_waits(found: doors.Found, loop: asyncio.AbstractEventLoop) -> doors.Place:
        knocked.append(asyncio.current_task())
        if len(knocked) == 1:
            with found.socket:
                await loop.create_future()
        return await knock(found, loop)

    monkeypatch.setattr(doors, "knock", first_waits)
    monkeypatch.setattr(inquiry, "ASK_S", 1000.0)
    async with serving() as (_, port):
        tasks = [asyncio.create_task(reached(port)) for _ in range(4)]
        await until_seen(lambda: knocked)
        tasks[1].cancel()  # one that waits, which changes nothing for the others
        tasks[0].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert list(map(type, found[:2])) == [asyncio.CancelledError] * 2 and found[2:] == ["rdma"] * 2
        assert knocked == [tasks[0], *tasks[2:]]


@pytest.fixture
async def first_knock(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], asyncio.Future[None]]:
    """The ports at whose doors this process knocks, and what the first of these waits for."""
    knock, knocked, may_go_on = doors.knock, list[int](), asyncio.get_running_loop().create_future()

    async def first_waits(found: doors.Found, loop: asyncio.AbstractEventLoop) -> doors.Place:
        knocked.append(found.port)
        if len(knocked) == 1:
            await may_go_on
        return await knock(found, loop)

    monkeypatch.setattr(doors, "knock", first_waits)
    monkeypatch.setattr(inquiry, "ASK_S", 1000.0)
    return knocked, may_go_on


async def test_who_chooses_by_other_settings_asks_anew(first_knock: Any) -> None:
    """A peer that is named is believed more: what is known of it is not for whoever takes it as it comes."""
    (knocked, may_go_on), loop = first_knock, asyncio.get_running_loop()
    rdmanet.patch_loop(loop, peers="127.0.0.1")
    async with serving() as (_, port):
        first = asyncio.create_task(reached(port))
        await until_seen(lambda: knocked)
        rdmanet.patch_loop(loop, peers="auto")
        assert await reached(port) == "rdma" and knocked == [port] * 2
        may_go_on.set_result(None)
        await first


async def test_what_other_settings_have_led_to_is_not_kept(
    first_knock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was believed more, and its connection has other options."""
    (knocked, may_go_on), loop = first_knock, asyncio.get_running_loop()
    monkeypatch.setattr(choice, "KEPT_S", 1000.0)
    rdmanet.patch_loop(loop, peers="127.0.0.1")
    async with serving() as (_, port):
        first = asyncio.create_task(reached(port))
        await until_seen(lambda: knocked)
        rdmanet.patch_loop(loop, peers="auto")
        may_go_on.set_result(None)
        assert await first == "rdma" and await reached(port) == "rdma" and knocked == [port] * 2
        assert await reached(port) == "rdma" and knocked == [port] * 2


async def test_what_is_not_for_all_is_asked_by_each(
    knocks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server deals connections out to its workers at the door, and says so by naming no listener for all."""
    knock = doors.knock

    async def of_workers(found: doors.Found, loop: asyncio.AbstractEventLoop) -> doors.Place:
        return (await knock(found, loop))._replace(listener=0)

    monkeypatch.setattr(doors, "knock", of_workers)
    async with serving() as (_, port):
        assert await asyncio.gather(*(reached(port) for _ in range(4))) == ["rdma"] * 4
        assert knocks == [port] * 4


async def test_all_who_wait_for_a_server_that_is_silent_take_tcp(
    knocks: list[int], listener: socket.socket
) -> None:
    port, descriptor = listener.getsockname()[1], listener.fileno()
    door = Door("127.0.0.1", port, lambda: Answer(port, descriptor))  # never opened
    connect = asyncio.get_running_loop().create_connection
    made = await asyncio.gather(*(connect(Recorder, "127.0.0.1", port) for _ in range(4)))
    assert [fabric(transport) for transport, _ in made] == ["tcp"] * 4 and knocks == [port]
    for transport, _ in made:
        transport.abort()
    door.close()


async def test_another_server_of_the_port_is_asked(knocks: list[int]) -> None:
    loop = asyncio.get_running_loop()
    async with serving() as (_, port):
        assert await reached(port) == "rdma"
    async with await loop.create_server(Echo, "127.0.0.1", port):
        assert await reached(port) == "rdma"
    assert knocks == [port] * 2


async def test_a_tcp_server_that_has_the_port_now_is_reached_by_tcp(knocks: list[int]) -> None:
    async with serving() as (_, port):
        assert await reached(port) == "rdma"
    with socket.create_server(("127.0.0.1", port)) as listener:
        transport, _ = await asyncio.get_running_loop().create_connection(Recorder, "127.0.0.1", port)
        assert fabric(transport) == "tcp"
        transport.abort()
        listener.accept()[0].close()


async def test_a_server_that_takes_rdma_no_more_is_reached_by_tcp(knocks: list[int]) -> None:
    """The same TCP listener, whose RDMA has ended: the attempt fails, and the door, which is gone, is asked."""
    async with serving() as (server, port):
        assert await reached(port) == "rdma"
        for each in server._rdma:
            each.close()
        assert await reached(port) == "tcp"
    assert knocks == [port]


async def test_one_that_has_begun_anew_is_asked_again(
    knocks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt fails where the door has led. It is asked again, and there is a connection."""
    async with serving() as (_, port):
        assert await reached(port) == "rdma"
        connect, failures = connecting.Attempt._connect_by, []

        async def fail_once(*arguments: Any) -> Any:
            if not failures:
                failures.append(port)
                raise ConnectionRefusedError("it listens no more")
            return await connect(*arguments)

        monkeypatch.setattr(connecting.Attempt, "_connect_by", fail_once)
        assert await reached(port) == "rdma"
        assert knocks == [port] * 2 and failures


async def test_one_that_ends_while_it_is_looked_at_is_looked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing of a process that has ended can be mapped. Its port may have another server by then, as here."""
    looked_at: list[int] = []

    def may_map(pid: int) -> bool:
        looked_at.append(pid)
        return len(looked_at) > 1

    monkeypatch.setattr(trust, "may_map", may_map)
    monkeypatch.setattr(trust.Speaker, "lives", lambda _: len(looked_at) != 1)
    async with serving() as (_, port):
        assert await reached(port) == "rdma"
    assert len(looked_at) == 2


async def test_one_that_lives_and_cannot_be_mapped_is_reached_by_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "may_map", lambda _: False)
    async with serving() as (_, port):
        assert await reached(port) == "tcp"


class Adapter:
    """Stands for the library of an adapter: its ports are not TCP's, and anybody may take a free one."""

    name = "adapter"
    embedded_device = False


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives this process an adapter that reaches the server, or does not: call it when the server is there.

    It returns the names of the libraries that connections are tried by. The embedded one connects for the adapter.
    """
    libraries, connect_by = addresses.libraries_for, connecting.Attempt._connect_by
    context_for = loop_context.loop_context_for
    names: list[str] = []

    async def context(loop: asyncio.AbstractEventLoop, library: Any) -> Any:
        return library if isinstance(library, Adapter) else await context_for(loop, library)

    def begin(reaches: bool) -> list[str]:
        async def connect(attempt: Any, by: Any, config: Any, address: Any) -> Any:
            embedded = libraries(("127.0.0.1", 1), None)[0]
            names.append("adapter" if isinstance(by, Adapter) else "embedded")
            if isinstance(by, Adapter):
                if not reaches:
                    raise ConnectionRefusedError("nobody listens by this adapter")
                by = await context_for(attempt._base.loop, embedded)
            return await connect_by(attempt, by, config, address)

        monkeypatch.setattr(addresses, "libraries_for", lambda *args: [Adapter(), *libraries(*args)])
        monkeypatch.setattr(loop_context, "loop_context_for", context)
        monkeypatch.setattr(connecting.Attempt, "_connect_by", connect)
        return names

    return begin


async def test_nothing_is_kept_for_an_adapter(knocks: list[int], tried: Any) -> None:
    """RDMA may have ended, and its port be another user's, while the same TCP listener is there."""
    async with serving() as (_, port):
        names = tried(reaches=True)
        assert [await reached(port) for _ in range(2)] == ["rdma"] * 2
        assert names == ["adapter"] * 2 and knocks == [port] * 2


async def test_what_one_asks_for_all_leads_all_to_an_adapter(knocks: list[int], tried: Any) -> None:
    """The answer is of this moment: it is not kept for anybody who comes later."""
    async with serving() as (_, port):
        names = tried(reaches=True)
        assert await asyncio.gather(*(reached(port) for _ in range(4))) == ["rdma"] * 4
        assert names == ["adapter"] * 4 and knocks == [port]


async def test_what_is_kept_leads_to_no_adapter(knocks: list[int], tried: Any) -> None:
    """Nobody had the port there when the door answered. Whoever has it now is not the server."""
    async with serving() as (_, port):
        names = tried(reaches=False)
        assert [await reached(port) for _ in range(3)] == ["rdma"] * 3
        assert names == ["adapter", *["embedded"] * 3] and knocks == [port]


async def test_each_host_is_chosen_for_itself(knocks: list[int]) -> None:
    """Two names may be of different patterns in RDMANET_PEERS."""
    async with serving() as (_, port):
        assert await reached(port) == await reached(port, "localhost") == "rdma"
        assert knocks == [port] * 2


async def test_who_has_workers_is_asked_each_time(listener: socket.socket) -> None:
    port, descriptor = listener.getsockname()[1], listener.fileno()
    loop = asyncio.get_running_loop()
    register = workers.Register(loop, "127.0.0.1", port, descriptor)
    assert register.lone_inode == os.fstat(descriptor).st_ino
    worker = workers.Registration(loop, "127.0.0.1", port, descriptor, 1001)
    await until_seen(lambda: register._places)
    assert register.lone_inode == 0
    worker.close()
    await until_seen(lambda: register.lone_inode)
    register.close()


@pytest.mark.parametrize("beside", [0, 1])
async def test_it_is_kept_only_for_the_listener_that_the_kernel_names(
    listener: socket.socket, beside: int
) -> None:
    port, descriptor = listener.getsockname()[1], listener.fileno()
    inode = os.fstat(descriptor).st_ino + beside
    door = Door("127.0.0.1", port, lambda: Answer(port, descriptor, inode))
    door.open(asyncio.get_running_loop())
    found = doors.find("127.0.0.1", port)
    assert isinstance(found, doors.Found)
    place = await doors.knock(found, asyncio.get_running_loop())
    assert place.listener == (0 if beside else inode) and place.holds() is not bool(beside)
    assert place.why_left() == ""
    door.close()


async def test_it_is_kept_only_while_the_doors_process_has_the_listener(listener: socket.socket) -> None:
    """It may have ended, and left the listener to a program that takes TCP alone: then RDMA's name is for others."""
    port, inode = listener.getsockname()[1], os.fstat(listener.fileno()).st_ino
    its = os.dup(listener.fileno())
    door = Door("127.0.0.1", port, lambda: Answer(port, its, inode))
    door.open(asyncio.get_running_loop())
    found = doors.find("127.0.0.1", port)
    assert isinstance(found, doors.Found)
    place = await doors.knock(found, asyncio.get_running_loop())
    door.close()
    assert place.holds()
    os.close(its)
    left = kernel.tcp_listener("127.0.0.1", port)
    assert left is not None and left.inode == place.listener and not place.holds()


@pytest.fixture
def listener() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


async def test_plain_servers_are_not_kept(knocks: list[int]) -> None:
    server, port = await plain_server()
    assert await reached(port) == "tcp" and knocks == []
    server.close()


async def test_the_kernel_is_asked_once_for_connections_that_follow_at_once(
    knocks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    holds, asked = doors.Place.holds, []

    def count(place: doors.Place) -> bool:
        asked.append(place)
        return holds(place)

    monkeypatch.setattr(doors.Place, "holds", count)
    monkeypatch.setattr(choice, "SURE_S", 1000.0)
    async with serving() as (_, port):
        assert [await reached(port) for _ in range(5)] == ["rdma"] * 5
        assert len(asked) == 1
        monkeypatch.setattr(choice, "SURE_S", -1.0)
    async with serving() as (_, port):
        assert [await reached(port) for _ in range(5)] == ["rdma"] * 5
        assert len(asked) == 1 + 4


async def test_a_server_that_goes_right_after_the_kernel_was_asked_is_missed_by_one_attempt(
    knocks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its RDMA has gone, too: the attempt fails, and the choice is made anew. Nobody is sent to a stranger."""
    monkeypatch.setattr(choice, "SURE_S", 1000.0)
    async with serving() as (_, port):
        assert [await reached(port) for _ in range(2)] == ["rdma"] * 2
    with socket.create_server(("127.0.0.1", port)) as listener:
        transport, _ = await asyncio.get_running_loop().create_connection(Recorder, "127.0.0.1", port)
        assert fabric(transport) == "tcp"
        transport.abort()
        listener.accept()[0].close()
