"""soft-run: every way to a verbs library leads to the device, and what is no verbs library is left alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rdmanet.cli.soft_program import why_it_escapes

from .test_soft_run import environment, soft_run  # noqa: F401

LIBRARY = Path(__file__).parents[2] / "rdmanet" / "soft" / "librdmanet_soft.so"

# A libibverbs as a wheel bundles it: with the real one's versions, and no device.
BUNDLED = """
void *ibv_get_device_list(int *count) { static void *none[1]; *count = 0; return none; }
"""
VERSIONS = "IBVERBS_1.1 { global: ibv_get_device_list; local: *; };"

# Says how many devices there are: of the library that it is linked with, or of the one that it opens.
COUNTS = """
#include <stdio.h>
void *ibv_get_device_list(int *count);
int count_devices(void) { int count; ibv_get_device_list(&count); return count; }
"""
OPENS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char **argv)
{
	void *library = dlopen(argv[1], RTLD_NOW | atoi(argv[3]));
	int (*call)(int *), count = -1, returned;

	if (!library)
		return puts(dlerror()), 1;
	*(void **)(void *)&call = argc > 4 ? dlvsym(library, argv[2], argv[4]) : dlsym(library, argv[2]);
	if (!call)
		return puts(dlerror()), 1;
	returned = call(&count) != 0;
	printf("%d %d\\n", returned, count);
	return 0;
}
"""


@pytest.fixture
def cc(tmp_path):
    """Compile a text to a file of this name, beside the others."""

    def compile_text(name, text, *options):
        (tmp_path / f"{name}.c").write_text(text)
        made = tmp_path / name
        subprocess.run(["cc", f"{made}.c", "-o", made, *options], check=True, cwd=tmp_path)
        return made

    return compile_text


@pytest.fixture
def bundled(cc, tmp_path):
    """A library of a wheel: libibverbs under a name that no library path has."""
    (tmp_path / "versions").write_text(VERSIONS)
    name = "libibverbs-1de1263b.so.1.14.48.0"
    return cc(name, BUNDLED, "-shared", "-fPIC", "-Wl,--version-script=versions", f"-Wl,-soname,{name}")


DEEPBIND = 8


@pytest.mark.parametrize("flags", [0, DEEPBIND])
def test_a_bundled_library_that_is_opened(environment, cc, bundled, flags):  # noqa: F811
    """By its own name, at its own place; also where the program asks for that library's symbols first."""
    opens = cc("opens", OPENS)
    arguments = [opens, bundled, "ibv_get_device_list", flags]
    assert subprocess.run([*map(str, arguments)], capture_output=True, text=True).stdout == "1 0\n"
    assert soft_run(environment, "--", *arguments) == (0, "1 1\n", "")
    assert soft_run(environment, "--", *arguments, "IBVERBS_1.1") == (0, "1 1\n", "")
    assert soft_run(environment, "--no-files", "--", *arguments) == (0, "1 0\n", "")


def test_a_program_linked_with_a_bundled_library(environment, cc, bundled, tmp_path):  # noqa: F811
    main = COUNTS + 'int main(void) { printf("%d\\n", count_devices()); }'
    program = cc("linked", main, bundled, "-Wl,-rpath,$ORIGIN")
    assert subprocess.run([program], capture_output=True, text=True).stdout == "0\n"
    assert soft_run(environment, "--", program) == (0, "1\n", "")


def test_a_module_linked_with_a_bundled_library(environment, cc, bundled):  # noqa: F811
    """As UCX's modules are: opened by a program that knows nothing of verbs."""
    module = cc("module.so", COUNTS, "-shared", "-fPIC", bundled, "-Wl,-rpath,$ORIGIN")
    assert soft_run(environment, "--", cc("opens", OPENS), module, "count_devices", 0) == (0, "1 -1\n", "")


def test_an_rpath_does_not_lead_past_the_device(environment, cc, tmp_path):  # noqa: F811
    """DT_RPATH comes before LD_LIBRARY_PATH, so the loader takes the program's own libibverbs.so.1."""
    (tmp_path / "versions").write_text(VERSIONS)
    own = cc(
        "libibverbs.so.1",
        BUNDLED,
        "-shared",
        "-fPIC",
        "-Wl,--version-script=versions,-soname,libibverbs.so.1",
    )
    main = COUNTS + 'int main(void) { printf("%d\\n", count_devices()); }'
    program = cc("linked", main, own, "-Wl,-rpath,$ORIGIN,--disable-new-dtags")
    assert soft_run(environment, "--", program) == (0, "1\n", "")


def test_other_libraries_are_left_alone(environment, cc, tmp_path):  # noqa: F811
    """A name that only begins alike is no verbs library."""
    text = "int which(int *unused) { (void)unused; return 0; }"
    opens = cc("opens", OPENS)
    for name in ("libibverbs_helper.so", "libibverbs-notes.txt", "librdmacmx.so.1", "libmy_ibverbs.so.1"):
        library = cc(name, text, "-shared", "-fPIC")
        assert soft_run(environment, "--", opens, library, "which", 0) == (0, "0 -1\n", "")
    status, out, err = soft_run(environment, "--", opens, tmp_path / "none.so", "which", 0)
    assert (status, err) == (1, "")
    assert "none.so: cannot open shared object file" in out


def test_a_library_finds_its_own_by_its_own_path(environment, cc, tmp_path):  # noqa: F811
    """The loader searches on the path of whoever calls dlopen(), and must not take the preloaded library for it."""
    (tmp_path / "beside").mkdir()
    opener = """
    #include <dlfcn.h>
    int opens_its_own(int *unused) { (void)unused; return dlopen("libits_own.so", RTLD_NOW) != 0; }
    """
    library = cc("libopener.so", opener, "-shared", "-fPIC", "-Wl,-rpath,$ORIGIN/beside")
    cc("libits_own.so", "int unused;", "-shared", "-fPIC").rename(tmp_path / "beside" / "libits_own.so")
    assert soft_run(environment, "--", cc("opens", OPENS), library, "opens_its_own", 0) == (0, "1 -1\n", "")


def test_says_which_programs_it_cannot_serve(environment, cc, tmp_path):  # noqa: F811
    static = cc("static", "int main(void) { return 3; }", "-static")
    script = tmp_path / "script"
    script.write_text(f"#!/usr/bin/env -S {static}\n")
    script.chmod(0o755)
    for program in (static, script):
        status, _, err = soft_run(environment, "--", program)
        assert (status, err) == (
            3,
            f"soft-run: the embedded device is out of reach: {static} is statically linked: it loads no libraries\n",
        )
    dynamic = cc("dynamic", "int main(void) { return 4; }")
    assert soft_run(environment, "--", dynamic) == (4, "", "")
    header = bytearray(dynamic.read_bytes())
    header[18] ^= 1
    (tmp_path / "alien").write_bytes(header)
    (tmp_path / "alien").chmod(0o755)
    assert "another machine" in why_it_escapes(str(tmp_path / "alien"), LIBRARY)
    assert why_it_escapes(sys.executable, LIBRARY) == ""
    assert why_it_escapes("/nonexistent", LIBRARY) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a program another user's rights")
def test_says_that_a_set_user_id_program_is_not_served(cc):
    program = cc("elevated", "int main(void) { return 0; }")
    os.chown(program, 61001, 61001)
    program.chmod(0o4755)
    assert "more rights than its user has" in why_it_escapes(str(program), LIBRARY)
    program.chmod(0o755)
    assert why_it_escapes(str(program), LIBRARY) == ""


@pytest.mark.parametrize("program", ["ls", "bash", "python3", "env"])
def test_programs_without_verbs_run_as_ever(environment, program):  # noqa: F811
    plain = subprocess.run([program, "--version"], capture_output=True, text=True)
    assert soft_run(environment, "--", program, "--version") == (0, plain.stdout, plain.stderr)
