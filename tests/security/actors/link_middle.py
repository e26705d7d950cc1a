"""Stands between two honest processes: argv is `relay` or `impostor`, the server's port, and who it is.

For each line that it is told, a new process of its own takes a name of a port, which is said, and an honest client
comes there. The relay wants the server's arena, and passes on what either says; where it can, with the other's nonce
in it. The impostor wants the client to take it for its server, and to map what it gives. It says what it `got`.
"""

import fcntl
import os
import socket

from link_words import (
    CHALLENGE,
    HELLO,
    PROOF,
    WELCOME,
    become_or_end,
    hear_on,
    link_to,
    offer,
    peer_of,
    read,
    say_on,
)

way, server_port, *roles = argv
SIZE = 1 << 20


def listen():
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    port = 1024 + os.getpid() % 30000
    listener.bind(f"\0rdmanet-soft/{port}")
    listener.listen()
    return listener, port


def relay(client):
    """The server's arena?"""
    kind, clients, _, _ = hear_on(client)
    assert kind == HELLO
    with link_to(server_port) as server:
        # Our own descriptor has the client's number, and the client's nonce, if we can read it.
        ours = offer(peer_of(server), read(peer_of(client), clients))
        if ours != clients:
            os.dup2(ours, clients)
        say_on(server, HELLO, clients)
        kind, servers, nonce, _ = hear_on(server)
        if kind != CHALLENGE:
            return False
        # The client looks for it among our descriptors.
        named = offer(peer_of(client), read(peer_of(server), servers))
        if named != servers:
            os.dup2(named, servers)
        say_on(client, CHALLENGE, servers, nonce)
        kind, _, nonce, _ = hear_on(client)
        say_on(server, PROOF, nonce=nonce or os.urandom(32))
        kind, _, _, arena = hear_on(server)
        return kind == WELCOME and arena is not None


def impostor(client):
    """Has the client shown that it takes us for its server, and stayed with what we gave it?"""
    kind, clients, _, _ = hear_on(client)
    assert kind == HELLO
    named = offer(peer_of(client), os.urandom(32))
    say_on(client, CHALLENGE, named, read(peer_of(client), clients))
    kind, _, _, _ = hear_on(client)
    if kind != PROOF:
        return False
    memory = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, SIZE)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    say_on(client, WELCOME, nonce=bytes(32), arena_size=SIZE, fd=memory)
    return True


become_or_end(roles, say)
say(ready=True)
while hear() is not None:
    if (child := os.fork()) == 0:
        listener, port = listen()
        say(port=port)
        got = {"relay": relay, "impostor": impostor}[way](listener.accept()[0])
        say(got=got)
        os._exit(0)
    os.waitpid(child, 0)
