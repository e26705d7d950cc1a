"""A call of a blocking stream that takes too long says for what it has waited."""

import threading

import pytest

import rdmanet

HOST = "127.0.0.1"


@pytest.fixture
def ends():
    with rdmanet.listen_rdma_stream(HOST) as listener:
        accepted = []
        accepting = threading.Thread(target=lambda: accepted.append(listener.accept()))
        accepting.start()
        with rdmanet.open_rdma_stream(HOST, listener.getsockname()[1], timeout=60) as near:
            accepting.join()
            with accepted[0] as far:
                yield near, far


@pytest.mark.embedded_only(
    "the text is the same on every device, and the address of loopback only the embedded one has"
)
def test_a_time_out_says_for_what(ends):
    near, far = ends
    near.settimeout(0.05)
    with pytest.raises(TimeoutError, match=r"^no byte came: not within 0.05 s$"):
        near.recv(1)
    with pytest.raises(TimeoutError, match=r"^the peer took no more bytes: not within 0.05 s$"):
        while True:
            near.sendall(bytes(1 << 20))
    near.abort()
    far.abort()


@pytest.mark.embedded_only(
    "the text is the same on every device, and the address of loopback only the embedded one has"
)
def test_who_waits_beside_another_thread(ends):
    """The other direction's call leads, and this one follows."""
    near, far = ends
    near.settimeout(0.2)
    found = []

    def read():
        try:
            near.recv(1)
        except TimeoutError as exc:
            found.append(str(exc))

    reading = threading.Thread(target=read)
    reading.start()
    with pytest.raises(TimeoutError, match="the peer took no more bytes: not within"):
        while True:
            near.sendall(bytes(1 << 20))
    reading.join()
    assert found == ["no byte came: not within 0.2 s"]
    near.abort()
    far.abort()
