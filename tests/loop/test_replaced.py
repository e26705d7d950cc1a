"""What a program, a test's mock or a library puts in a method's place, and what it looks at on the loop."""

import asyncio
import functools
import inspect
import socket
import sys
from unittest import mock

import pytest
import uvloop
from loop_harness import Echo, Recorder, fabric, plain_server, serving

import rdmanet

ASYNCIO = asyncio.SelectorEventLoop
HOW_TO_ASK = [inspect.iscoroutinefunction]
if sys.version_info < (3, 14):  # asyncio's is deprecated since
    HOW_TO_ASK.append(asyncio.iscoroutinefunction)


def test_coroutine_functions_are_coroutine_functions(base):
    """mock's autospec makes an AsyncMock of these, and a Mock of others."""
    plain, switched = base(), rdmanet.loop_factory(base)
    try:
        for name in dir(asyncio.AbstractEventLoop):
            for is_one in HOW_TO_ASK:
                if is_one(getattr(plain, name)):
                    assert is_one(getattr(switched, name)), name
    finally:
        plain.close()
        switched.close()


def test_methods_are_declared_as_the_bases(base):
    """Libraries look at signatures to know what a loop takes, and give arguments by their names."""
    loops = base(), rdmanet.loop_factory(base)
    plain, switched = map(type, loops)
    for loop in loops:
        loop.close()
    replaced = 0
    for name in dir(plain):
        theirs, ours = getattr(plain, name), getattr(switched, name)
        if ours is theirs or name.startswith("__"):
            continue
        for attribute in "__name__", "__qualname__", "__module__", "__doc__":
            assert getattr(ours, attribute) == getattr(theirs, attribute), name
        signature = inspect.signature(theirs)
        assert inspect.signature(ours) == signature, name
        assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(theirs), name
        by_name = {p.name: None for p in signature.parameters.values() if p.kind != p.VAR_POSITIONAL}
        inspect.signature(ours, follow_wrapped=False).bind(**by_name)
        replaced += 1
    assert replaced >= 15 and switched.__doc__ == plain.__doc__


async def test_arguments_by_the_bases_names():
    loop = asyncio.get_running_loop()
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        other.setblocking(False)
        await loop.sock_sendall(sock=one, data=b"abc")
        assert await loop.sock_recv(sock=other, n=2) == b"ab"
        readable = loop.create_future()
        which = "fileobj" if isinstance(loop, uvloop.Loop) else "fd"
        loop.add_reader(**{which: other, "callback": functools.partial(readable.set_result, None)})
        await readable
        loop.remove_reader(other)


@pytest.mark.parametrize("name", ["create_connection", "create_server", "sock_connect"])
async def test_a_mock_with_the_methods_signature(name):
    loop = asyncio.get_running_loop()
    with mock.patch.object(loop, name, autospec=True, spec_set=True) as made:
        made.return_value = "made"
        assert await getattr(loop, name)(mock.Mock(), "127.0.0.1") == "made"


async def test_a_call_does_nothing_before_it_is_awaited():
    """Coroutine functions raise what is wrong with their arguments when they run."""
    loop = asyncio.get_running_loop()
    for call in loop.create_connection(None, None), loop.sock_connect(None, None):
        with pytest.raises((TypeError, ValueError, AttributeError)):
            await call


def test_the_class_says_whose_loop_it_is(base):
    loop = rdmanet.loop_factory(base)
    loop.close()
    assert type(loop).__module__ == base.__module__ in ("uvloop", "asyncio.unix_events")


async def test_the_loops_own_resolver_is_asked():
    """asyncio's create_connection() asks the loop's getaddrinfo(), uvloop's asks none."""
    loop = asyncio.get_running_loop()
    asked = []
    async with serving() as (_, port):
        plain, other = await plain_server()

        async def getaddrinfo(host, port, **kwds):
            asked.append(host)
            to = port if host == "one.example" else other
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", to))]

        loop.getaddrinfo = getaddrinfo
        try:
            if isinstance(loop, uvloop.Loop):
                with pytest.raises(OSError):
                    await loop.create_connection(Recorder, "one.example", port)
                assert not asked
                return
            for host, takes in ("one.example", "rdma"), ("two.example", "tcp"):
                transport, _ = await loop.create_connection(Recorder, host, port)
                assert fabric(transport) == takes
                transport.abort()
            assert asked == ["one.example", "two.example"]
        finally:
            del loop.getaddrinfo
            plain.close()


async def two_addresses(host, port, **kwds):
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{n}", port)) for n in (2, 1)]


def test_a_subclass_with_its_own_resolver():
    class Own(ASYNCIO):
        getaddrinfo = staticmethod(two_addresses)

    async def main():
        async with serving() as (_, port):
            transport, _ = await asyncio.get_running_loop().create_connection(Recorder, "some.example", port)
            transport.abort()
            return fabric(transport), transport.get_extra_info("peername")[0]

    assert rdmanet.run(main(), loop_factory=Own) == ("rdma", "127.0.0.1")


def on_asyncios(test):
    """uvloop's create_connection() calls no other method of the loop, and its class cannot be changed."""

    @functools.wraps(test)
    def run(*args, **kwds):
        rdmanet.run(test(*args, **kwds), loop_factory=ASYNCIO)

    return run


@pytest.mark.parametrize("resolver", [None, two_addresses], ids=["one address", "two addresses"])
@on_asyncios
async def test_the_loops_own_sock_connect_connects_by_tcp(monkeypatch, resolver):
    """asyncio's create_connection() connects its sockets by the loop's sock_connect(); it may be the program's."""
    loop = asyncio.get_running_loop()
    plain, port = await plain_server()
    connect, connected = loop.sock_connect, []

    async def sock_connect(sock, address):
        connected.append(address[0])
        await connect(sock, address)

    monkeypatch.setattr(loop, "sock_connect", sock_connect)
    if resolver is not None:
        monkeypatch.setattr(loop, "getaddrinfo", resolver)
    transport, protocol = await loop.create_connection(
        Recorder, "some.example" if resolver else "127.0.0.1", port
    )
    assert fabric(transport) == "tcp" and connected == (["127.0.0.2"] * bool(resolver) + ["127.0.0.1"])
    transport.write(b"x")
    await protocol.until(lambda: protocol.data == b"x")
    transport.abort()
    plain.close()


@on_asyncios
async def test_a_method_of_the_base_that_is_replaced_later(monkeypatch):
    """It is the class's at the time of the call."""
    loop = asyncio.get_running_loop()
    plain, port = await plain_server()
    for _ in range(2):  # the second time TCP is known to reach it
        transport, _ = await loop.create_connection(Recorder, "127.0.0.1", port)
        transport.abort()
    calls = []
    create = asyncio.BaseEventLoop.create_connection

    async def replaced(self, *args, **kwds):
        calls.append(args[1:])
        return await create(self, *args, **kwds)

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", replaced)
    for options in {}, {"ssl": None, "proto": socket.IPPROTO_TCP}:
        transport, _ = await loop.create_connection(Echo, "127.0.0.1", port, **options)
        transport.abort()
    assert calls == [("127.0.0.1", port)] * 2
    plain.close()
