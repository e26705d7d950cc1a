"""What a program asks of an identifier that it cannot have, and a client that goes before it is answered."""

import contextlib
import errno

import pytest
from loops import on_every_loop
from test_async_cm import CAP, End

from rdmanet.verbs import PD, QPCap, QPInitAttr
from rdmanet.verbs_async import AsyncCMID, AsyncCMListener, AsyncCQ


@contextlib.asynccontextmanager
async def resolved(loop, device, listener):
    with AsyncCMID(library=device.library, notifier=loop.notifier) as id:
        await id.resolve(listener.local_addr)
        yield id


@contextlib.asynccontextmanager
async def asked(loop, device, address):
    """A listener, a client, its connect(), which is under way, and its request."""
    with AsyncCMListener((address, 0), library=device.library, notifier=loop.notifier) as listener:
        async with resolved(loop, device, listener) as id:
            client = End(loop, id)
            with contextlib.closing(client):
                connecting = loop.spawn(id.connect(b"hello"))
                yield listener, client, connecting, await listener.get_request()


@on_every_loop
async def test_a_connection_needs_a_queue_pair(loop, device, address):
    """Refused at once on both sides, where the peer would wait for one that never comes. Either may mend it."""
    with AsyncCMListener((address, 0), library=device.library, notifier=loop.notifier) as listener:
        async with resolved(loop, device, listener) as id:
            with pytest.raises(
                ValueError, match=r"connect\(\) on .* needs a queue pair: call create_qp\(\) first"
            ):
                await id.connect(b"hello")
            client = End(loop, id)
            with contextlib.closing(client):
                connecting = loop.spawn(id.connect(b"hello"))
                request = await listener.get_request()
                with request, pytest.raises(ValueError, match=r"accept\(\) on .* needs a queue pair"):
                    await request.accept()
                with pytest.raises(ConnectionRefusedError):
                    await connecting.join()


async def request_of_one_who_went(loop, device, listener):
    """A request whose client has gone, which the server may not know yet."""
    async with resolved(loop, device, listener) as id:
        client = End(loop, id)
        connecting = loop.spawn(id.connect(b"hello"))
        request = await listener.get_request()
        client.close()
        with pytest.raises(ValueError, match="closed"):
            await connecting.join()
        return request


@pytest.mark.not_on_siw("lets go of an identifier that connects when it is answered, or after ten seconds")
@on_every_loop
async def test_a_client_that_has_gone_is_rejected(loop, device, address):
    """That it went is no mistake of the server's: the request is closed, and nothing is raised."""
    with AsyncCMListener((address, 0), library=device.library, notifier=loop.notifier) as listener:
        request = await request_of_one_who_went(loop, device, listener)
        request.reject(b"busy")
        assert request.closed


@pytest.mark.embedded_only("the kernel tells the server of it when it likes, or when it is answered")
@on_every_loop
async def test_a_client_that_is_known_to_have_gone_is_rejected(loop, device, address):
    with AsyncCMListener((address, 0), library=device.library, notifier=loop.notifier) as listener:
        request = await request_of_one_who_went(loop, device, listener)
        await request.disconnected()
        request.reject(b"busy")
        assert request.closed


@on_every_loop
async def test_what_the_kernel_says_of_a_client_that_has_gone(loop, device, address):
    """EINVAL, as of the caller's mistakes: too much data, or a request that was answered. Those are still told."""
    refused = OSError(errno.EINVAL, "rdma_reject: Invalid argument")
    async with asked(loop, device, address) as (_, client, connecting, request):
        assert not client.id._has_gone(refused, b"busy"), "it is no request"
        assert request._has_gone(refused, bytes(148))
        assert not request._has_gone(refused, bytes(149))
        server = End(loop, request)
        with contextlib.closing(server):
            await request.accept()
            await connecting.join()
            with pytest.raises(OSError, match="rdma_reject") as caught:
                request.reject(b"busy")
            assert caught.value.errno == errno.EINVAL and not request.closed


@on_every_loop
async def test_a_request_that_was_rejected_wrongly_can_be_again(loop, device, address):
    """Private data that is too long is the caller's mistake: it is told, and the request stays."""
    async with asked(loop, device, address) as (listener, client, connecting, request):
        with request:
            with pytest.raises(ValueError, match="256 bytes is too long"):
                request.reject(bytes(256))
            assert not request.closed
            request.reject(b"busy")
            assert request.closed
        with pytest.raises(ConnectionRefusedError):
            await connecting.join()
        assert client.id.private_data.rstrip(b"\0") == b"busy"


@pytest.mark.parametrize("ended", ["rejected", "established"])
@on_every_loop
async def test_a_used_identifier_says_that_a_new_one_is_needed(loop, device, address, ended):
    async with asked(loop, device, address) as (listener, client, connecting, request):
        with contextlib.ExitStack() as stack:
            stack.callback(request.close)
            if ended == "rejected":
                request.reject()
                with pytest.raises(ConnectionRefusedError):
                    await connecting.join()
            else:
                server = End(loop, request)
                stack.callback(server.close)
                await request.accept()
                await connecting.join()
                with pytest.raises(OSError, match="rdma_accept: .* needs a new identifier"):
                    await request.accept()
            with pytest.raises(OSError, match="rdma_connect to .* needs a new identifier") as caught:
                await client.id.connect(b"hello again")
            assert caught.value.errno == errno.EINVAL
            with pytest.raises(OSError, match="rdma_resolve_addr.* needs a new identifier"):
                await client.id.resolve(listener.local_addr)


@pytest.mark.not_on_iwarp("has no receiver-not-ready")
@on_every_loop
async def test_how_long_a_peer_waits_that_finds_no_receive(loop, device, address):
    """The same on every device, and after QP.connect(): 640 us, not the kernel's 655 ms."""
    async with asked(loop, device, address) as (listener, client, connecting, request):
        server = End(loop, request)
        with contextlib.closing(server):
            await server.id.accept()
            await connecting.join()
            for end in (client, server):
                assert end.qp.qp.query()[0].min_rnr_timer == 12


@on_every_loop
async def test_ones_own_queue_pair_of_a_plain_program(loop, device, address):
    """create_qp() of the identifier below counts as well: what matters is that there is one."""
    with AsyncCMListener((address, 0), library=device.library, notifier=loop.notifier) as listener:
        async with resolved(loop, device, listener) as id:
            with PD(id.context) as pd, AsyncCQ(id.context, 64, notifier=loop.notifier) as cq:
                with id.id.create_qp(pd, QPInitAttr(cq.cq, cq.cq, QPCap(**CAP))):
                    connecting = loop.spawn(id.connect())
                    server = End(loop, await listener.get_request())
                    with contextlib.closing(server):
                        await server.id.accept()
                        await connecting.join()


@pytest.mark.embedded_only("the kernel has other errors for some of these mistakes")
@on_every_loop
async def test_a_step_that_does_not_come_next_says_what_came_last(loop, device, address):
    """Whichever it is: the error names the call, the identifier, and how far that has come."""
    async with asked(loop, device, address) as (listener, _, connecting, request):
        async with resolved(loop, device, listener) as id:
            server = End(loop, id)
            with contextlib.closing(server):
                for step in (id.resolve_route, id.accept, id.disconnect):
                    with pytest.raises(
                        OSError, match=r"rdma_\w+: .*AsyncCMID.*: its route is resolved"
                    ) as caught:
                        await step()
                    assert caught.value.errno == errno.EINVAL
                with pytest.raises(OSError, match=r"rdma_reject: .*: its route is resolved"):
                    id.reject()
                assert not id.closed
        with request, pytest.raises(OSError, match=r"rdma_resolve_route: .*: it is a request that waits"):
            await request.resolve_route()
        with pytest.raises(ConnectionRefusedError):
            await connecting.join()


@on_every_loop
async def test_an_identifier_that_is_closed_says_so(loop, device, address):
    with AsyncCMListener((address, 0), library=device.library, notifier=loop.notifier) as listener:
        async with resolved(loop, device, listener) as id:
            pass
        for step in (id.connect, id.accept, id.disconnect, id.resolve_route, id.event, id.disconnected):
            with pytest.raises(ValueError, match="this (Async)?CMID is closed"):
                await step()
        for step in (id.reject, id.establish):
            with pytest.raises(ValueError, match="this (Async)?CMID is closed"):
                step()


@pytest.mark.embedded_only("the kernel says EINVAL here, whatever is wrong")
@on_every_loop
async def test_only_a_request_is_rejected_silently(loop, device, address):
    """A connecting identifier that the peer has refused has nothing to reject."""
    async with asked(loop, device, address) as (_, client, connecting, request):
        request.reject()
        with pytest.raises(ConnectionRefusedError):
            await connecting.join()
        with pytest.raises(OSError, match="rdma_reject"):
            client.id.reject()
        assert not client.id.closed
