"""The secret: what a proof of it gives away, and that a process which has had one never lets strangers in again."""

import hashlib

import pytest

WORDS = 20_000
PASSPHRASE = "open sesame"


@pytest.fixture
def words(tmp_path):
    """What an attacker tries first; the passphrase is among it, as such are."""
    path = tmp_path / "words"
    listed = [f"word{number}" for number in range(WORDS - 1)]
    path.write_text("\n".join([*listed[:7000], PASSPHRASE, *listed[7000:]]))
    return path


def test_a_proof_does_not_give_the_secret_away(stage, guarded, words) -> None:
    """A process at the address of a client's peer gets a proof, and can test guesses against it at leisure.

    The device does not take a word as a secret; without that the word is found.
    """
    cracker = stage.start("cracker", words)
    port = cracker.hear()["port"]
    client = stage.start(
        "secret_client",
        port,
        without="" if guarded else "secret-key",
        RDMANET_SOFT_TRANSPORT="stream",
        RDMANET_SOFT_SECRET=PASSPHRASE,
    )
    if guarded:
        assert "a secret is 64 hexadecimal digits" in client.hear()["refused"]
        # With one that it takes a proof is got, and nothing fits: not even what the word would make of a key.
        key = hashlib.sha256(b"another word").hexdigest()
        client = stage.start("secret_client", port, RDMANET_SOFT_TRANSPORT="stream", RDMANET_SOFT_SECRET=key)
    assert client.hear() == {"connecting": True}
    cracker.tell(comes=True)
    assert cracker.hear() == {"tried": WORDS, "found": None if guarded else PASSPHRASE}


def test_a_secret_is_not_lost_with_the_environment(stage, guarded) -> None:
    """The variable is gone when the device is opened again: strangers are kept out all the same."""
    server = stage.start(
        "forgetful_server",
        without="" if guarded else "secret-kept",
        RDMANET_SOFT_TRANSPORT="stream",
        RDMANET_SOFT_SECRET="5e" * 32,
    )
    where = server.hear()
    attempts = 100 if guarded else 1
    intruder = stage.start("intruder", where["number"], where["peer"], where["psn"], where["gid"], attempts)
    if guarded:
        expected = {"challenge": attempts, "secret": attempts}
    else:
        expected = {"welcome": attempts}
    assert intruder.hear() == {"attempts": attempts, "answers": expected}
    said = server.finish()
    assert (
        not guarded
        or "rdmanet soft0: refused a connection from 127.0.0.1: it does not know the secret\n" in said
    )
