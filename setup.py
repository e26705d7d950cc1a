"""Builds the two compiled modules and the embedded device's shared library.

The library is an ordinary C shared object, not a Python module: it exports the
libibverbs and librdmacm ABI and is opened by path.

Switches (environment): RDMANET_DEBUG=1 (assertions, -O0), RDMANET_SANITIZE=address,undefined
(any -fsanitize= list), RDMANET_COVERAGE=1 (gcov and Cython line tracing), RDMANET_WERROR=1.
"""

import os
from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOFT = "rdmanet.soft.librdmanet_soft"

cflags = ["-std=gnu11", "-g", "-Wall", "-Wextra"]
ldflags = []
directives = {"language_level": 3, "binding": True, "embedsignature": True}
if os.environ.get("RDMANET_DEBUG"):
    cflags += ["-O0", "-DRDMANET_DEBUG=1", "-UNDEBUG"]
else:
    cflags += ["-O2", "-DNDEBUG"]
if sanitizers := os.environ.get("RDMANET_SANITIZE"):
    cflags += [f"-fsanitize={sanitizers}", "-fno-omit-frame-pointer"]
    ldflags += [f"-fsanitize={sanitizers}"]
if os.environ.get("RDMANET_COVERAGE"):
    cflags += ["--coverage"]
    ldflags += ["--coverage"]
    directives["linetrace"] = True
if os.environ.get("RDMANET_WERROR"):
    cflags += ["-Werror"]

# What Cython generates is not ours to polish.
cython_cflags = [*cflags, "-Wno-unused-function", "-Wno-unused-parameter", "-Wno-unused-variable"]
headers = glob("rdmanet/abi/*.h")
parts = glob("rdmanet/_pyx/*") + glob("rdmanet/*.pxd")


class BuildLibrary(build_ext):
    """build_ext that also builds a plain shared library, without Python's suffix or init symbol."""

    def get_ext_filename(self, fullname):
        if fullname.endswith("librdmanet_soft"):
            return os.path.join("rdmanet", "soft", "librdmanet_soft.so")
        return super().get_ext_filename(fullname)

    def get_export_symbols(self, ext):
        return [] if ext.name == SOFT else super().get_export_symbols(ext)


extensions = [
    *cythonize(
        [
            Extension(
                "rdmanet.credit",
                ["rdmanet/credit.py"],
                depends=["rdmanet/credit.pxd"],
                extra_compile_args=cython_cflags,
                extra_link_args=ldflags,
            ),
            Extension(
                "rdmanet._core",
                ["rdmanet/_core.pyx", *sorted(glob("rdmanet/abi/*.c"))],
                include_dirs=["rdmanet/abi", "rdmanet/_pyx"],
                depends=headers + parts,
                extra_compile_args=cython_cflags,
                extra_link_args=ldflags,
            ),
        ],
        compiler_directives=directives,
    ),
    Extension(
        SOFT,
        sorted(glob("rdmanet/soft/*.c")),
        include_dirs=["rdmanet/abi", "rdmanet/soft"],
        depends=headers + glob("rdmanet/soft/*.h") + ["rdmanet/soft/soft.map"],
        extra_compile_args=[*cflags, "-fvisibility=hidden", "-pthread"],
        extra_link_args=[
            *ldflags,
            "-pthread",
            "-Wl,-soname,librdmanet_soft.so",
            "-Wl,--version-script,rdmanet/soft/soft.map",
            "-Wl,-z,nodelete",
        ],
    ),
]

setup(ext_modules=extensions, cmdclass={"build_ext": BuildLibrary})
