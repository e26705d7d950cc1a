"""The command line's own parts: tables, progress, and that a wrong command is said to be wrong."""

import io

import pytest

from rdmanet.cli.text import Progress, rate_text, size_text, table


def test_table_aligns_numbers_to_the_right():
    text = table([("name", "us"), ("a", "1.5"), ("long name", "12.25")], indent="")
    assert text.splitlines() == [
        "name          us",
        "---------  -----",
        "a            1.5",
        "long name  12.25",
    ]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (1 << 20, "1.0 MiB"), (64 << 20, "64.0 MiB")],
)
def test_a_size_has_a_unit_that_fits(nbytes, text):
    assert size_text(nbytes) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0, "0.00 kB/s"), (460, "0.46 kB/s"), (83e6, "83.00 MB/s"), (1e8, "0.10 GB/s"), (2.306e9, "2.31 GB/s")],
)
def test_a_rate_has_a_unit_that_fits(rate, text):
    assert rate_text(rate) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_in_a_log_is_a_line_each_quarter():
    out = io.StringIO()
    progress = Progress(100, out=out)
    for done in range(1, 101):
        progress.update(done)
    lines = out.getvalue().splitlines()
    assert [line.split("]")[1].split()[0] for line in lines] == ["25%", "50%", "75%", "100%"]


def test_progress_on_a_terminal_is_redrawn_in_place():
    out = Terminal()
    progress = Progress(100, out=out)
    for done in range(1, 101):
        progress.update(done)
    assert out.getvalue().endswith("\n")
    assert out.getvalue().count("\n") == 1
    assert "100%" in out.getvalue().rpartition("\r")[2]


def test_progress_of_nothing_is_complete():
    out = io.StringIO()
    Progress(0, out=out).update(0)
    assert "100%" in out.getvalue()


def test_unknown_command_is_refused(capsys):
    from rdmanet.cli.command_line import main

    with pytest.raises(SystemExit) as status:
        main(["nonsense"])
    assert status.value.code == 2
    assert "usage" in capsys.readouterr().err
