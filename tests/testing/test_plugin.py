"""The pytest plugin: what its users' tests meet. Each test runs pytest on one of theirs."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "testing.md"
EXAMPLES = dict(re.findall(r"```python\n# (test_\w+\.py)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL))

[CONFTEST] = re.findall(r"```\w+\n((?:[^`]*\n)?clock = (?:.*?))```", DOCUMENT.read_text(), re.DOTALL)


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Run pytest with the plugin in a process of its own, as a user does."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("RDMANET_SOFT_CHAOS", raising=False)
    # Only what the tests need: most of the time would be that of other plugins, when they are imported.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    plugin = ("-p", "rdmanet.testing")

    pytester.makeini("[pytest]\nfilterwarnings = error\n")

    def run(*arguments: str) -> pytest.RunResult:
        return pytester.runpytest_subprocess(*plugin, "-p", "no:cacheprovider", *arguments)

    return run


@pytest.fixture
def installed(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Run pytest as it is where rdmanet is installed: by the entry point that a wheel has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    [[name, module]] = project["project"]["entry-points"]["pytest11"].items()
    assert module in project["tool"]["setuptools"]["py-modules"]  # so the wheel has it
    info = pytester.path / "site" / "rdmanet-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rdmanet\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[pytest11]\n{name} = {module}\n")
    monkeypatch.setenv("PYTHONPATH", f"{info.parent}:{ROOT}")
    return lambda *arguments: pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)


def test_pytest_asyncio_by_a_clock(run, pytester: pytest.Pytester) -> None:
    """By the conftest.py of the page, as it is there."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile("""
        import asyncio

        import conftest
        import pytest

        @pytest.mark.asyncio
        async def test_an_hour():
            begun = asyncio.get_running_loop().time()
            hour = asyncio.ensure_future(asyncio.sleep(3600))
            await conftest.clock.advance(3600)
            await hour
            assert asyncio.get_running_loop().time() - begun == 3600
    """)
    run("-p", "pytest_asyncio.plugin", "-o", "asyncio_default_fixture_loop_scope=function").assert_outcomes(
        passed=1
    )


def test_it_is_loaded_once(pytester, installed) -> None:
    """Also where somebody asks for it by its name, as they had to before they installed rdmanet."""
    pytester.makepyfile("""
        import pytest

        @pytest.mark.rdma_seeds(2)
        def test_it(rdma_seed):
            assert rdma_seed in (1, 2)
    """)
    installed("-p", "rdmanet.testing").assert_outcomes(passed=2)
    pytester.makeconftest('pytest_plugins = ["rdmanet.testing"]')
    installed().assert_outcomes(passed=2)


def test_it_costs_nothing_where_it_is_not_used(pytester, installed) -> None:
    """In every pytest run of every user of the package: nothing of it is imported."""
    pytester.makeconftest("""
        import sys

        def pytest_sessionfinish(session):
            print("plugin:", session.config.pluginmanager.has_plugin("rdmanet"))
            print("imported:", sorted(name for name in sys.modules if name.partition(".")[0] == "rdmanet"))
    """)
    pytester.makepyfile("""
        import unittest

        def test_it(request):
            assert not [name for name in request.fixturenames if "rdma" in name]

        class TestThat(unittest.TestCase):
            def test_that(self):
                pass
    """)
    result = installed("-s")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*plugin: True", "imported: []"])


def test_it_is_there_where_it_is_installed(pytester, installed) -> None:
    pytester.makepyfile("""
        import pytest

        @pytest.mark.rdma_rules("iwarp")
        @pytest.mark.rdma_seeds(2)
        @pytest.mark.rdma_faults("fail=alloc_pd")
        def test_it(rdma_device, rdma_faults, rdma_no_leaks):
            from rdmanet.verbs import PD, TransportType

            assert rdma_device.transport_type == TransportType.IWARP
            with rdma_device.open() as context, pytest.raises(OSError):
                PD(context)

        def test_nothing(rdma_address, rdma_peer, rdma_seed):
            assert rdma_seed is None
    """)
    installed().assert_outcomes(passed=3)


def test_there_are_three_examples() -> None:
    assert set(EXAMPLES) == {"test_client.py", "test_endpoint.py", "test_recovery.py", "test_calls.py"}


@pytest.mark.parametrize(
    ("name", "passed"),
    [("test_client.py", 6), ("test_endpoint.py", 6), ("test_recovery.py", 1), ("test_calls.py", 3)],
)
def test_the_examples_of_the_documentation_work(pytester, run, name, passed) -> None:
    (pytester.path / name).write_text(EXAMPLES[name])
    run().assert_outcomes(passed=passed)


def test_seeds_are_in_the_name_and_in_the_faults(pytester, run) -> None:
    pytester.makepyfile("""
        import pytest

        @pytest.mark.rdma_seeds(3)
        @pytest.mark.rdma_faults("loss=5%", may_miss=True)
        def test_it(rdma_faults, rdma_seed):
            assert rdma_faults.text == f"seed={rdma_seed}, loss=5%"

        def test_without(rdma_faults, rdma_seed):
            assert rdma_faults.text == "" and rdma_seed is None
    """)
    result = run("-v")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["*test_it?seed1? PASSED*", "*test_it?seed3? PASSED*"])


def test_a_fault_that_never_happened_fails_the_test(pytester, run) -> None:
    pytester.makepyfile("""
        import pytest

        @pytest.mark.rdma_faults("loss=send:3")
        def test_it():
            pass
    """)
    result = run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*these of its faults have never come to pass: loss=send:3 (*"])


def test_a_fault_that_happened_does_not_hide_one_that_never_did(pytester, run) -> None:
    pytester.makepyfile("""
        import pytest
        from rdmanet.verbs import PD

        def fail_once(device):
            with device.open() as context, pytest.raises(OSError):
                PD(context)

        @pytest.mark.rdma_faults("fail=alloc_pd:1", "loss=send:3, dup=5%")
        def test_it(rdma_device, rdma_faults):
            fail_once(rdma_device)
            assert rdma_faults.counts == {"fail=alloc_pd:1": 1, "loss=send:3": 0, "dup=5%": 0}

        @pytest.mark.rdma_faults("fail=alloc_pd:1", "loss=send:3", may_miss=True)
        def test_may_miss(rdma_device):
            fail_once(rdma_device)

        @pytest.mark.rdma_faults("fail=alloc_pd:1")
        def test_others_do_not_count(rdma_device, rdma_faults):
            fail_once(rdma_device)
            with rdma_faults("memlock=2M"):
                pass
            assert rdma_faults.counts == {"fail=alloc_pd:1": 1, "memlock=2M": 0}
            assert rdma_faults.happened == 1
    """)
    result = run()
    result.assert_outcomes(failed=1, passed=2)
    result.stdout.fnmatch_lines(["*these of its faults have never come to pass: loss=send:3, dup=5% (*"])


def test_a_failure_says_which_faults_there_were(pytester, run) -> None:
    pytester.makepyfile("""
        import pytest
        from rdmanet.verbs import PD

        @pytest.mark.rdma_seeds(1)
        @pytest.mark.rdma_faults("fail=alloc_pd:50%")
        def test_it(rdma_device):
            with rdma_device.open() as context:
                for _ in range(50):
                    PD(context).close()
    """)
    result = run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*- rdma faults -*", "RDMANET_SOFT_CHAOS='seed=1, fail=alloc_pd:50%', 1 happened"]
    )


def test_a_mistake_is_explained(pytester, run) -> None:
    pytester.makepyfile("""
        import pytest

        @pytest.mark.rdma_faults("los=5%")
        def test_it():
            pass
    """)
    result = run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(['*los=5%: unknown fault "los"; use delay, loss*'])


def test_faults_end_with_their_block_and_their_test(pytester, run) -> None:
    pytester.makepyfile("""
        import pytest
        from rdmanet.verbs import PD

        def test_block(rdma_device, rdma_faults):
            with rdma_device.open() as context:
                rdma_faults.set("delay=1us")
                with rdma_faults("fail=alloc_pd"):
                    with pytest.raises(OSError):
                        PD(context)
                assert rdma_faults.text == "delay=1us"
                assert rdma_faults.happened == 1
                PD(context).close()
                rdma_faults.set("fail=alloc_pd")

        def test_after(rdma_device):
            with rdma_device.open() as context:
                PD(context).close()
    """)
    run().assert_outcomes(passed=2)


def test_leaks_are_found(pytester, run) -> None:
    pytester.makepyfile("""
        kept = []

        def test_it(rdma_device, rdma_no_leaks):
            kept.append(rdma_device.open())

        def test_clean_up():
            kept.pop().close()
    """)
    result = run()
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*left behind by this test: {'contexts': 1}*"])


def test_iwarp_by_mark(pytester, run) -> None:
    pytester.makepyfile("""
        import pytest

        @pytest.mark.rdma_rules("iwarp")
        def test_iwarp(rdma_device):
            assert rdma_device.transport_type.name == "IWARP"

        def test_roce(rdma_device):
            assert rdma_device.transport_type.name == "IB"
            with rdma_device.open(): pass
    """)
    run().assert_outcomes(passed=2)


def test_peers_freeze_and_die(pytester, run) -> None:
    pytester.makepyfile(
        server="""
            import asyncio, rdmanet

            async def answer(reader, writer):
                while line := await reader.readline():
                    writer.write(line)

            async def main():
                server = await rdmanet.start_rdma_stream_server(answer, "127.0.0.1", 0)
                print(server.sockets[0].getsockname()[1])
                await server.serve_forever()

            asyncio.run(main())
        """,
        test_it="""
            import asyncio, pytest, rdmanet

            def test_it(rdma_peer, rdma_no_leaks):
                peer = rdma_peer("server.py")
                asyncio.run(talk(peer, int(peer.hear())))

            async def talk(peer, port):
                reader, writer = await rdmanet.open_rdma_connection("127.0.0.1", port)
                async with asyncio.timeout(20):
                    writer.write(b"a\\n")
                    assert await reader.readline() == b"a\\n"
                    peer.freeze()
                    writer.write(b"b\\n")
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0.05):
                            await reader.readline()
                    peer.thaw()
                    assert await reader.readline() == b"b\\n"
                    peer.kill()
                    with pytest.raises(ConnectionError):
                        await reader.readline()
                writer.close()

            def test_silence(rdma_peer, tmp_path):
                script = tmp_path / "silent.py"
                script.write_text("input()")
                peer = rdma_peer(script)
                with pytest.raises(TimeoutError, match="silent.py printed no line"):
                    peer.hear(0.05)
                peer.say("go on")
                with pytest.raises(EOFError):
                    peer.hear()
                assert peer.wait() == 0
        """,
    )
    run().assert_outcomes(passed=2)


def test_tcp_may_be_excluded_for_one_test(pytester, run) -> None:
    pytester.makepyfile("""
        import asyncio, pytest, rdmanet

        async def connect():
            loop = asyncio.get_running_loop()
            plain = await loop._rdmanet.base.create_server(asyncio.Protocol, "127.0.0.1", 0)
            port = plain.sockets[0].getsockname()[1]
            try:
                transport, _ = await loop.create_connection(asyncio.Protocol, "127.0.0.1", port)
                transport.close()
                return transport.get_extra_info("fabric")
            finally:
                plain.close()

        @pytest.mark.rdma_only
        def test_only_rdma():
            with pytest.raises(ConnectionRefusedError, match="no program on this host offers RDMA there"):
                rdmanet.run(connect())

        def test_any():
            assert rdmanet.run(connect()) == "tcp"
    """)
    run().assert_outcomes(passed=2)


def test_another_device_has_no_faults(pytester, run) -> None:
    pytester.makepyfile("""
        def test_faults(rdma_faults):
            pass

        def test_device(rdma_device, rdma_address):
            assert rdma_device.name == "soft0" and rdma_address
    """)
    run("--rdma-device", "soft0").assert_outcomes(passed=1, skipped=1)
    result = run("--rdma-device", "nowhere0")
    result.assert_outcomes(errors=1, skipped=1)
    result.stdout.fnmatch_lines(["*there is no device nowhere0; there are*soft0*"])


@pytest.mark.parametrize(
    ("faults", "outcome"),
    [
        ("loss=send:2:1", "same"),
        ("ackloss=send:2:1", "same"),
        ("dup=send:2", "same"),
        ("delay=1ms", "same"),
        ("rnr=send:2", "ConnectionResetError"),
        ("fail=send:2:RNR_RETRY_EXC_ERR", "ConnectionResetError"),
    ],
)
def test_what_faults_do_to_streams(pytester, run, faults, outcome) -> None:
    """As the page says: which cost time, and which break the connection."""
    pytester.makepyfile(f"""
        import asyncio, rdmanet

        async def echo(reader, writer):
            try:
                while line := await reader.readline():
                    writer.write(line)
            except ConnectionError:
                pass
            writer.close()

        async def ask(faults):
            async with await rdmanet.start_rdma_stream_server(echo, "127.0.0.1", 0) as server:
                port = server.sockets[0].getsockname()[1]
                reader, writer = await rdmanet.open_rdma_connection("127.0.0.1", port)
                try:
                    faults.set({faults!r})
                    for _ in range(10):
                        writer.write(b"a\\n")
                        assert await reader.readline() == b"a\\n"
                    return "same"
                except OSError as exc:
                    return type(exc).__name__
                finally:
                    writer.close()

        def test_it(rdma_faults):
            assert asyncio.run(ask(rdma_faults)) == {outcome!r}
            assert rdma_faults.happened >= 1
    """)
    run().assert_outcomes(passed=1)
