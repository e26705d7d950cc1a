"""The stage itself: what it can't show doesn't pass for shown."""

from pathlib import Path

import pytest

CONFTEST = (Path(__file__).parent / "conftest.py").read_text()


@pytest.mark.parametrize(
    ("ci", "outcomes"), [("true", {"failed": 2, "errors": 1}), ("", {"skipped": 3})], ids=["CI", "not CI"]
)
def test_ci_fails_where_it_skips(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, ci: str, outcomes: dict[str, int]
) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile("""
        import pytest
        from conftest import unfit

        def test_unfit():
            unfit("there is no root here")

        def test_skip():
            pytest.skip("there is no root here")

        @pytest.mark.skipif(True, reason="there is no root here")
        def test_mark():
            pass
    """)
    monkeypatch.setenv("CI", ci)
    # In this process, where the device may have a handler of SIGBUS that a second faulthandler would take away.
    quiet = ("-p", "no:faulthandler", "-o", "asyncio_default_fixture_loop_scope=function")
    result = pytester.runpytest("-ra", *quiet)
    result.assert_outcomes(**outcomes)
    assert result.stdout.str().count("there is no root here") >= 3
