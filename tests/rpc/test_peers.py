"""Who calls: the address, the transport, the user of this host, and the certificate; and who is let in by that."""

import os
import ssl
import struct
from typing import Any

import pytest
from net import HOST, Net, failure

import rdmanet
from rdmanet import rpc
from rdmanet.rpc import CallInfo, Code, peers
from rdmanet.rpc.interceptors import Proceed
from tests.support.certificates import CERTIFICATES, of_client, of_server


class Who(rpc.Service):
    def __init__(self) -> None:
        self.seen: rpc.Peer | None = None

    async def look(self) -> str:
        self.seen = rpc.peer()
        return str(self.seen)


async def test_who_calls(net: Net):
    service = Who()
    client, server = await net.pair(service)
    assert await client.look() == str(next(iter(server.callees)).link.peer)
    peer = service.seen
    assert peer is not None and peer.transport == net.transport and peer.certificate is None
    if net.is_by_name:
        assert (peer.user, peer.group, peer.process) == (os.getuid(), os.getgid(), os.getpid())
    else:
        assert (peer.group, peer.process) == (None, None) and peer.address[0] == HOST
        assert peer.user is None or (net.transport == "rdma" and peer.user == os.getuid())
    assert rpc.peer() is None


async def test_by_which_fabric(net: Net):
    async def pass_on(call: CallInfo, proceed: Proceed) -> Any:
        return await proceed()

    service = Who()
    client, server = await net.pair(service)
    await client.look()
    assert service.seen is not None
    assert rdmanet.fabric(service.seen).fabric == rdmanet.fabric(client).fabric == net.transport
    if net.transport == "rdma":
        assert rdmanet.fabric(service.seen).reason == "the client came by RDMA"
        assert rdmanet.fabric(client).device == rdmanet.connections()[0].device != ""
    for options in {"interceptors": [pass_on]}, {"retry": rpc.Retry()}, {"retry": rpc.Retry(), "lazy": True}:
        async with net.connecting(Who, server, **options) as other:
            if "lazy" in options:
                with pytest.raises(LookupError, match="WhoClient has no connection, or none any more"):
                    rdmanet.fabric(other)
                await other.look()
            assert rdmanet.fabric(other) == rdmanet.fabric(client)


@pytest.mark.parametrize("transport", ["unix"])
async def test_numbers_that_the_kernel_may_say(net: Net, monkeypatch: pytest.MonkeyPatch):
    """Users have 32 bits without sign. A process of another PID namespace has no number here."""

    class Credentials(struct.Struct):
        def unpack(self, known: Any) -> tuple[Any, ...]:
            assert super().unpack(known) == (os.getpid(), os.getuid(), os.getgid())
            return super().unpack(struct.pack("iII", 0, 4294967294, 4294967293))

    monkeypatch.setattr(peers, "_CREDENTIALS", Credentials(peers._CREDENTIALS.format))
    service = Who()
    client, _ = await net.pair(service)
    await client.look()
    assert service.seen is not None
    assert (service.seen.user, service.seen.group, service.seen.process) == (4294967294, 4294967293, None)


@pytest.mark.parametrize("transport", ["rdma", "tcp"])
async def test_the_certificate(net: Net):
    """A recipe: TLS on both sides, and a service that asks whose certificate it is."""

    async def known(call: CallInfo, proceed: Proceed) -> Any:
        subject = dict(item for (item,) in (call.peer.certificate or {}).get("subject", ()))
        if subject.get("commonName") != "client":
            raise rpc.Error(Code.UNAUTHENTICATED, "who are you?")
        return await proceed()

    service = Who()
    there = of_server(verify_mode=ssl.CERT_OPTIONAL)
    server = await net.serve(service, ssl=there, interceptors=[known])
    stranger, here = of_client(), of_client()
    here.load_cert_chain(CERTIFICATES / "client.pem")
    client = await net.connect(Who, server, ssl=here, server_hostname="localhost")
    await client.look()
    assert service.seen is not None and service.seen.certificate is not None
    assert service.seen.certificate["subject"] == ((("commonName", "client"),),)
    assert service.seen.certificate["issuer"] and service.seen.transport == net.transport
    client = await net.connect(Who, server, ssl=stranger, server_hostname="localhost")
    assert (await failure(client.look())).code is Code.UNAUTHENTICATED


@pytest.mark.parametrize("transport", ["unix"])
@pytest.mark.parametrize("is_own", [True, False])
async def test_users_of_this_host(net: Net, monkeypatch: pytest.MonkeyPatch, is_own: bool):
    wanted = os.getuid() + (not is_own)

    async def own(call: CallInfo, proceed: Proceed) -> Any:
        if call.peer.user != wanted:
            raise rpc.Error(Code.PERMISSION_DENIED, f"user {call.peer.user} may not")
        return await proceed()

    server = await net.serve(Who(), interceptors=[own])
    client = await net.connect(Who, server)
    if is_own:
        await client.look()
    else:
        assert (await failure(client.look())).text == f"user {os.getuid()} may not"


@pytest.mark.parametrize("intercept_builtin", [False, True])
async def test_interceptors_and_what_every_server_has(net: Net, intercept_builtin: bool):
    """Whoever asks for a token need not have one from who looks whether the server is healthy."""
    seen = []

    async def token(call: CallInfo, proceed: Proceed) -> Any:
        seen.append(f"{call.service}.{call.method}")
        if call.metadata.get("token") != "secret":
            raise rpc.Error(Code.UNAUTHENTICATED, "there is no token")
        return await proceed()

    server = await net.serve(Who(), interceptors=[token], intercept_builtin=intercept_builtin)
    client = await net.connect(Who, server)
    assert (await failure(client.look())).code is Code.UNAUTHENTICATED
    await rpc.options(client, metadata={"token": "secret"}).look()
    health = await net.connect(rpc.Health, server)
    reflection = await net.connect(rpc.Reflection, server)
    if intercept_builtin:
        assert (await failure(health.check())).code is Code.UNAUTHENTICATED
        assert await rpc.options(health, metadata={"token": "secret"}).check() == "SERVING"
        assert seen[2:] == ["rdmanet.Health.check"] * 2
    else:
        assert await health.check() == "SERVING" and await reflection.services()
        assert seen == ["Who.look", "Who.look"]
