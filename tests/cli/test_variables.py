"""Each environment variable that is set has a finding of doctor, and a wrong one is blamed for what it breaks."""

import json
import re
import resource

import pytest

from rdmanet.base import environment
from rdmanet.cli import checks, doctor, secret, variables
from tests.cli.test_commands import ENVIRONMENT, one_line, run, spoken

PLAIN = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("RDMANET_")}


def findings_of(*arguments, **environment):
    status, out, _ = run("doctor", "--json", *arguments, env=PLAIN | environment)
    findings = json.loads(out)["findings"]
    return status, findings, [finding for finding in findings if finding["check"] == "variables"]


def test_each_variable_has_an_effect_to_tell():
    assert len(environment.EFFECTS) > 20 and all(environment.EFFECTS.values())


def test_none_is_set():
    _, _, said = findings_of()
    assert [(finding["status"], finding["found"]) for finding in said] == [
        ("ok", "none is set, so the defaults apply")
    ]


def test_each_that_is_set_has_one_row(tmp_path):
    file = tmp_path / "secret"
    assert run("secret", file)[0] == 0
    status, _, said = findings_of(
        RDMANET_PEERS="auto !*:5432",
        RDMANET_PLACE_BYTES="65536",
        RDMANET_SOFT_CM_TIMEOUT="2000",
        RDMANET_SOFT_SECRET_FILE=str(file),
        RDMANET_REQIRE="rdma",
        RDMANET_SOFT_LOG="",
    )
    assert status == 0
    assert [(finding["status"], finding["found"]) for finding in said] == [
        ("ok", "RDMANET_PEERS=auto !*:5432: whom the event loop reaches by RDMA"),
        ("ok", "RDMANET_PLACE_BYTES=65536: reads of less are copied"),
        ("warn", "RDMANET_REQIRE is no variable of rdmanet, and has no effect"),
        ("ok", "RDMANET_SOFT_CM_TIMEOUT=2000: how long the connection manager waits for an answer, in ms"),
        (
            "ok",
            f"RDMANET_SOFT_SECRET_FILE={file}: peers on other hosts and of other users must have the same secret",
        ),
    ]
    assert said[2]["advice"] == "unset it, or set RDMANET_REQUIRE if you meant that"


def test_a_secret_is_not_shown():
    key = run("secret")[1].strip()
    _, findings, said = findings_of(RDMANET_SOFT_SECRET=key)
    assert [finding["status"] for finding in said] == ["ok"]
    assert said[0]["found"].startswith("RDMANET_SOFT_SECRET is set: ")
    assert key not in json.dumps(findings)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("RDMANET_REQUIRE", "RDMA", "RDMANET_REQUIRE=RDMA: set it to rdma or no-tcp, or unset it"),
        ("RDMANET_PLACE_BYTES", "64K", "RDMANET_PLACE_BYTES=64K: set it to a number of bytes"),
        ("RDMANET_DEVICE", "mlx5_77", "RDMANET_DEVICE=mlx5_77: there is no such device; there is"),
        ("RDMANET_PEERS", "10.0.0.0/99", "10.0.0.0/99"),
        ("RDMANET_SOFT", "remote", "RDMANET_SOFT=remote: must be local, or not set"),
        ("RDMANET_SOFT_CMA", "2", "RDMANET_SOFT_CMA=2: must be 1 or 0"),
        ("RDMANET_SOFT_CM_TIMEOUT", "2s", "RDMANET_SOFT_CM_TIMEOUT=2s: must be a whole number of milliseconds"),
        ("RDMANET_SOFT_CHAOS", "los=5%", "RDMANET_SOFT_CHAOS: "),
        ("RDMANET_SOFT_SECRET", "12345", "RDMANET_SOFT_SECRET: it has 5 characters; a secret is 64 hexadecimal digits"),
        ("RDMANET_SOFT_SECRET_FILE", "/nonexistent", "RDMANET_SOFT_SECRET_FILE=/nonexistent: "),
        ("RDMANET_SOFT_LIBRARY", "/nonexistent.so", "RDMANET_SOFT_LIBRARY=/nonexistent.so: /nonexistent.so: "),
        ("RDMANET_SOFT_TIMEOUT", "7", "unknown variable RDMANET_SOFT_TIMEOUT; did you mean RDMANET_SOFT_"),
    ],
)  # fmt: skip
def test_a_value_that_makes_no_sense(name, value, why):
    """It fails, with the reason, and what fails because of it refers to it."""
    status, findings, said = findings_of(**{name: value})
    assert status == 1
    assert [(finding["status"], finding["check"]) for finding in said] == [("fail", "variables")]
    assert why in said[0]["found"] and f"unset {name}" in said[0]["advice"]
    for finding in findings:
        if finding["check"] == "ports" and finding["status"] == "fail":
            assert finding["advice"] == "see `variables` above" and name in finding["found"]


def test_two_at_a_time():
    """Each is told what concerns it, though the device tells of both in one error, which has semicolons."""
    _, _, said = findings_of(RDMANET_SOFT_CMA="2", RDMANET_SOFT_SECRET="12345", RDMANET_SOFT_LOG="1")
    cma, log, key = said
    assert cma["found"] == "RDMANET_SOFT_CMA=2: must be 1 or 0"
    assert log["status"] == "ok"
    assert re.match(r"RDMANET_SOFT_SECRET: it has 5 characters; a secret is 64 hex", key["found"])
    assert "CMA" not in key["found"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("RDMANET_REQUIRE", "yes"), ("RDMANET_DEVICE", "mlx5_77"), ("RDMANET_SOFT_SECRET_FILE", "/nonexistent")],
)
def test_a_ping_that_fails_on_this_side(name, value):
    """The other host has nothing to do with it."""
    _, findings, _ = findings_of("127.0.0.1", **{name: value})
    [ping] = [finding for finding in findings if finding["check"] == "ping"]
    assert (ping["status"], ping["advice"]) == ("fail", "see `variables` above")


def test_an_adapter_is_required_and_there_is_none(monkeypatch):
    there = checks._core.Library.embedded().devices()
    monkeypatch.setattr(variables._core, "devices", lambda: there)
    for name in [name for name in variables.os.environ if name.startswith("RDMANET_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RDMANET_REQUIRE", "rdma")
    [finding] = variables.variables(doctor.Path("/"))
    assert finding.status == "fail" and "no connection can be made" in finding.found
    assert finding.advice.startswith("correct it, or unset RDMANET_REQUIRE")


def test_two_secrets(tmp_path):
    """The error names the variable from which this side's secret is, and what both sides have to do."""
    files = [tmp_path / "one", tmp_path / "two"]
    for file in files:
        assert run("secret", file)[0] == 0
    with spoken("doctor", "--serve", 0, RDMANET_SOFT_SECRET_FILE=str(files[0])) as server:
        port = re.search(r":(\d+)", server.line())[1]
        status, findings, _ = findings_of(f"127.0.0.1:{port}", RDMANET_SOFT_SECRET_FILE=str(files[1]))
        ping = findings[-1]
        assert (status, ping["check"], ping["status"]) == (1, "ping", "fail")
        assert "has another secret than RDMANET_SOFT_SECRET_FILE here" in ping["found"]
        assert ping["advice"].startswith("set the same secret on both hosts")
        none = findings_of(f"127.0.0.1:{port}")[1][-1]
        assert "none is set here (RDMANET_SOFT_SECRET_FILE or RDMANET_SOFT_SECRET)" in none["found"]


def test_the_limit_of_files(monkeypatch):
    """The embedded device's memory is a file, which `ulimit -f` concerns."""
    limit = [resource.RLIM_INFINITY]
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit[0], resource.RLIM_INFINITY))
    root = doctor.Path("/")
    assert [finding.status for finding in checks.filesize(root)] == ["ok"]
    limit[0] = 1 << 30
    [finding] = checks.filesize(root)
    assert (finding.status, "1048576 KiB" in finding.found) == ("ok", True)
    limit[0] = 64 << 20
    [finding] = checks.filesize(root)
    assert (finding.status, "65536 KiB" in finding.found) == ("fail", True)
    assert finding.advice.startswith("ulimit -f unlimited")


def test_a_file_without_a_name():
    status, out, err = run("secret", "")
    assert (status, out) == (2, "") and "the file name is empty" in err
    for command in ("run", "soft-run"):
        status, out, err = run(command, "")
        assert (status, out) == (2, "") and one_line(err).startswith(f"{command}: no program given; ")
    status, out, err = run("demo", "")
    assert (status, out) == (2, "") and "the file name is empty" in err
    assert secret.file_path("x") == doctor.Path("x")


def test_one_device():
    """By its name, as of `gids`; and a GID is written the same way by both."""
    _, out, _ = run("devices", "--json", "soft0")
    [device] = json.loads(out)["devices"]
    _, out, _ = run("gids", "--json", "soft0")
    gids = json.loads(out)["gids"]
    of_devices = [gid["gid"] for gid in device["ports"][0]["gids"]]
    assert of_devices == [gid["gid"] for gid in gids]
    assert all(re.fullmatch(r"([0-9a-f]{4}:){7}[0-9a-f]{4}", gid) for gid in of_devices)
    status, out, err = run("devices", "nosuchdevice")
    assert (status, out) == (1, "") and one_line(err).startswith(
        "devices: no device is named nosuchdevice; devices: "
    )
    assert run("devices", "nosuchdevice", "--json")[0] == 1


def test_where_doctor_answers():
    """Addresses as one writes them."""
    with spoken("doctor", "--serve", 0) as server:
        assert re.fullmatch(r"answering pings on( (0\.0\.0\.0|\[::\]):\d+)+", server.line().rstrip())
