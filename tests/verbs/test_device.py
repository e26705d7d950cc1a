"""Libraries, devices, ports and addresses."""

import os
import shutil
import subprocess
import sys

import msgspec
import pytest

from rdmanet import verbs as v
from rdmanet.errors import DeviceNotFoundError


def run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


def test_the_embedded_device_is_always_there():
    found = v.Library.embedded().devices()
    assert len(found) == 1
    assert found[0].library is v.Library.embedded()
    iwarp = os.environ.get("RDMANET_SOFT_RULES") == "iwarp"
    assert found[0].transport_type == (v.TransportType.IWARP if iwarp else v.TransportType.IB)
    assert [device.name for device in v.devices() if device.library.embedded_device] == [found[0].name]


@pytest.mark.embedded_only("no device is opened")
def test_a_missing_library_is_a_line_and_no_error():
    output = run(
        "from rdmanet import verbs as v\n"
        "print([d for d in v.devices() if d.library.embedded_device], v.Library.missing()['embedded'])",
        RDMANET_SOFT_LIBRARY="/nowhere/lib.so",
    )
    assert output.startswith("[] ") and "/nowhere/lib.so" in output


@pytest.mark.embedded_only("no device is opened")
def test_what_embedded_says_without_its_library():
    output = run(
        "from rdmanet import verbs as v\n"
        "try: v.Library.embedded()\n"
        "except v.DeviceNotFoundError as exc: print(exc)",
        RDMANET_SOFT_LIBRARY="libm.so.6",
    )
    assert "cannot be loaded: libm.so.6 has no ibv_get_device_list" in output


def test_a_library_is_opened_once():
    assert v.Library.embedded() is v.Library.embedded()
    with pytest.raises(TypeError, match=r"Library\.embedded"):
        v.Library()


def test_device(device, context):
    attributes = context.query_device()
    assert attributes.phys_port_cnt >= 1
    assert attributes.max_qp > 0 and attributes.max_qp_wr > 0 and attributes.max_cqe > 0
    assert attributes.node_guid == device.guid
    assert device.node_type == (
        v.NodeType.RNIC if device.transport_type == v.TransportType.IWARP else v.NodeType.CA
    )
    assert context.num_comp_vectors >= 1
    assert device.name in repr(context)


def test_port(context):
    port = context.query_port(1)
    assert port.state == v.PortState.ACTIVE
    assert port.active_mtu.bytes in (256, 512, 1024, 2048, 4096)
    assert port.max_msg_sz >= 1 << 20
    with pytest.raises(OSError, match=r"ibv_query_port\(99\)"):
        context.query_port(99)


def test_addresses(context):
    table = context.gid_table()
    assert table
    for entry in table:
        assert context.query_gid(entry.port_num, entry.gid_index) == entry.gid
        assert len(entry.gid) == 16
    with pytest.raises(OSError, match="index 4000"):
        context.query_gid(1, 4000)


def test_addresses_of_the_embedded_device():
    """All of this host's, loopback's last."""
    with v.Library.embedded().devices()[0].open() as context:
        found = {str(entry.address): entry for entry in context.gid_table()}
        assert found["127.0.0.1"].gid_type == v.GIDType.ROCE_V2
        assert str(found["127.0.0.1"]).startswith("::ffff:")
        order = [entry.address.is_loopback for entry in context.gid_table()]
        assert order == sorted(order)


def test_addresses_of_loopback_only(monkeypatch):
    monkeypatch.setenv("RDMANET_SOFT", "local")
    with v.Library.embedded().devices()[0].open() as context:
        found = {str(entry.address) for entry in context.gid_table()}
        assert {"127.0.0.1"} <= found <= {"127.0.0.1", "::1"}


def test_records_are_json_and_msgpack(context):
    """The records are dataclasses, which msgspec writes, and reads again, as they are."""
    for record in (context.query_device(), context.query_port(), context.gid_table()[0]):
        for format in (msgspec.json, msgspec.msgpack):
            assert format.decode(format.encode(record), type=type(record)) == record


@pytest.mark.not_on_siw("has no partitions")
def test_pkey(context):
    assert context.pkey(1, 0) & 0x7FFF


def test_no_event_is_none(context):
    assert context.get_async_event() is None
    assert context.async_fd >= 0


def test_a_device_may_be_opened_twice(device):
    with device.open() as first, device.open() as second:
        assert first.query_device() == second.query_device()
        with v.PD(first) as pd, v.CQ(second, 4) as cq, pytest.raises(ValueError, match="two contexts"):
            v.QP(pd, v.QPInitAttr(cq, cq))


def test_a_context_with_children_is_busy(device):
    context = device.open()
    pd = v.PD(context)
    with pytest.raises(OSError, match="1 open objects") as caught:
        context.close()
    assert caught.value.errno == 16
    assert not context.closed
    pd.close()
    context.close()
    assert context.closed
    context.close()


def test_closed_is_said(device):
    context = device.open()
    context.close()
    for use in (context.query_device, context.gid_table, lambda: context.async_fd, lambda: v.PD(context)):
        with pytest.raises(ValueError, match="Context is closed"):
            use()
    assert "closed" in repr(context)


def test_errors_are_of_the_system():
    assert issubclass(DeviceNotFoundError, OSError)
    with pytest.raises(TypeError):
        v.Context()


# ---- What the kernel refuses ---------------------------------------------------------------------------------

REFUSING = """
#include <errno.h>
#include <stddef.h>

void *ibv_open_device(void *device)
{
    (void)device;
    errno = EACCES;
    return NULL;
}

void *rdma_create_event_channel(void)
{
    errno = ENODEV;
    return NULL;
}
"""

ASKING = """
import rdmanet.cm as cm, rdmanet.verbs as v

library = v.Library.embedded()
for call in (library.devices()[0].open, lambda: cm.CMEventChannel(library)):
    try:
        call()
    except OSError as exc:
        print(exc, exc.__notes__)
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler (cc)")
@pytest.mark.embedded_only("a library that refuses is made of the embedded device's")
def test_what_the_kernel_refuses_has_a_remedy(tmp_path):
    source, library = tmp_path / "refusing.c", tmp_path / "librefusing.so"
    source.write_text(REFUSING)
    soft = v.Library.embedded().path
    compile = ["cc", "-shared", "-fPIC", "-o", library, source, "-Wl,--no-as-needed", soft]
    subprocess.run(
        compile, env=os.environ | {"LD_PRELOAD": ""}, check=True
    )  # no sanitizer watches the compiler
    said = run(ASKING, RDMANET_SOFT_LIBRARY=str(library), LD_LIBRARY_PATH=os.path.dirname(soft))
    opened, channel = said.splitlines()
    assert "Permission denied" in opened and "chmod" in opened
    assert "No such device" in channel and "modprobe" in channel
