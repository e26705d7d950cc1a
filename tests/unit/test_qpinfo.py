"""What queue pairs tell each other: its forms, and what is none."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmanet.wire.qpinfo import QPInfo

INFO = QPInfo(0x11, 0x8F3A21, bytes(10) + b"\xff\xff\x0a\x00\x00\x01")
TEXT = "0000:000011:8f3a21:00000000000000000000ffff0a000001"

infos = st.builds(
    QPInfo,
    st.integers(0, (1 << 24) - 1),
    st.integers(0, (1 << 24) - 1),
    st.binary(min_size=16, max_size=16),
    st.integers(0, (1 << 16) - 1),
    st.sampled_from((256, 512, 1024, 2048, 4096)),
)


@given(infos)
def test_every_form_leads_back(info):
    assert QPInfo.from_bytes(bytes(info)) == info
    assert QPInfo.from_text(str(info)) == info
    assert msgspec.json.decode(msgspec.json.encode(info), type=QPInfo) == info
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=QPInfo) == info
    assert hash(info) == hash(QPInfo.from_bytes(bytes(info)))


def test_the_text_is_that_of_ibv_rc_pingpong():
    assert str(INFO) == TEXT and len(TEXT) == 51
    for said in (TEXT, TEXT.upper(), TEXT.encode() + b"\0", TEXT + "\n"):
        assert QPInfo.from_text(said) == INFO


def test_another_mtu_is_a_fifth_part():
    assert str(msgspec.structs.replace(INFO, mtu=4096)) == TEXT + ":4096"
    assert QPInfo.from_text(TEXT + ":4096").mtu == 4096


def test_the_bytes():
    assert bytes(INFO) == INFO.gid + bytes.fromhex("00000011 008f3a21 0000 0400")


@pytest.mark.parametrize(
    "text",
    ["", "0:0:0", TEXT[:-1], TEXT + "0", TEXT + ":1000", TEXT.replace("8f", "xx"), TEXT + ":", b"\xff"],
)
def test_what_is_no_text(text):
    with pytest.raises(ValueError):
        QPInfo.from_text(text)


@pytest.mark.parametrize("data", [b"", bytes(27), bytes(29), b"\xff" * 28, bytes(28)])
def test_what_are_no_bytes(data):
    with pytest.raises(ValueError):
        QPInfo.from_bytes(data)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"qp_num": 1 << 24}, "qp_num 16777216 does not fit in 24 bits"),
        ({"qp_num": -1}, "qp_num -1"),
        ({"qp_num": 1, "psn": 1 << 24}, "psn"),
        ({"qp_num": 1, "lid": 1 << 16}, "lid 65536"),
        ({"qp_num": 1, "gid": b"short"}, "gid: 5 bytes, a GID has 16"),
        ({"qp_num": 1, "mtu": 1000}, "mtu 1000 is not one of 256, 512"),
    ],
)
def test_what_does_not_fit(fields, said):
    with pytest.raises(ValueError, match=said):
        QPInfo(**fields)


def test_what_does_not_fit_in_json():
    with pytest.raises(msgspec.ValidationError, match="mtu 1000"):
        msgspec.json.decode(b'{"qp_num": 1, "mtu": 1000}', type=QPInfo)
    with pytest.raises(msgspec.ValidationError, match="port"):
        msgspec.json.decode(b'{"qp_num": 1, "port": 1}', type=QPInfo)
