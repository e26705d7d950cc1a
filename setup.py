"""Builds the compiled modules and the embedded device's shared library; everything else is in pyproject.toml.

The device is an ordinary C shared object, not a Python module: it exports the libibverbs and
librdmacm ABI and is opened by path, so it is neither linked nor named like an extension.

Switches (environment; after changing one, build with --force or run `make clean`):
    RDMANET_DEBUG=1                     assertions on, no optimisation
    RDMANET_SANITIZE=address,undefined  any list that the compiler's -fsanitize= takes
    RDMANET_COVERAGE=1                  gcov for C, line tracing for Cython
    RDMANET_WERROR=1                    warnings are errors
    RDMANET_CLANG=1                     the compiler is clang, and is to make small code for a wheel (scripts/wheels)
"""

import os
import runpy
import sysconfig
from glob import glob

from Cython.Build import cythonize
from Cython.Compiler import Options
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

DEVICE = "rdmanet.soft.librdmanet_soft"
FILES = "rdmanet.soft.librdmanet_files"
SHARED = "rdmanet._cython"

cflags = ["-std=gnu11", "-g", "-Wall", "-Wextra"]
ldflags = []
directives = {"language_level": 3, "binding": True, "embedsignature": True}
instrumented = any(os.environ.get(f"RDMANET_{name}") for name in ("DEBUG", "SANITIZE", "COVERAGE"))
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

# What Cython generates is not ours to polish. Lines and functions are enough for a backtrace; its variables would
# take a fifth of the compiler's time.
generated_cflags = [
    *cflags,
    *([] if instrumented else ["-g1"]),
    "-Wno-unused-function",
    "-Wno-unused-parameter",
    "-Wno-unused-variable",
    "-Wno-sign-compare",
    "-Wno-missing-field-initializers",  # it sets the slots of a type that it knows; Python 3.15 has another one
]
# Compiled Python runs long paths once for each call or connection: smaller code is as fast there, and makes a smaller
# wheel. What runs for each frame is _core's, credit.py's and wire's.
small_cflags = [*generated_cflags, *([] if instrumented else ["-Os"])]
# For scripts/wheels. A wheel has no symbols, and nothing to unwind a C stack by: CPython makes tracebacks from its own
# frames.
clang_cflags = [
    "-g0",
    "-fno-asynchronous-unwind-tables",
    "-fno-unwind-tables",
    "-fomit-frame-pointer",
    "-fno-plt",
]
# clang's -Os is as fast as -O2 for what Cython generates, also if it inlines Cython's longer helpers less often. Cython
# would compress the strings of each module, less than a wheel does, and unpack bound methods at each call. Its small
# code runs once, when a module is imported.
clang_generated_cflags = [
    "-Os",
    "-mllvm",
    "-inlinehint-threshold=100",  # instead of 325
    "-DCYTHON_COMPRESS_STRINGS=0",
    "-DCYTHON_UNPACK_METHODS=0",
    "-DCYTHON_SMALL_CODE=__attribute__((minsize))",
]
clang_smallest_cflags = [
    *("-Xclang", "-Oz"),  # `zig cc` takes -Oz for -Os
    "-DCYTHON_USE_PYLONG_INTERNALS=0",
    "-DCYTHON_USE_FREELISTS=0",
]
abi_headers = [*glob("rdmanet/abi/*.h"), "rdmanet/abi/bus_error.c"]  # the device includes that one
cython_faces = [
    path for folder in ("", "wire/", "stream/", "rpc/") for path in glob(f"rdmanet/{folder}*.pxd")
]
cython_parts = [
    *glob("rdmanet/_pyx/*"),
    "rdmanet/_verbs.pxd",
    "rdmanet/credit.pxd",
    *glob("rdmanet/wire/*.pxd"),
]
SMALL = ("rdmanet.rpc.", "rdmanet.stream.")
# What each frame, or each call of rpc, takes most of its instructions in. clang makes all the rest as small as it can.
BUSIEST = (
    "rdmanet._core",
    "rdmanet.rpc.first_steps",
    "rdmanet.rpc.framing",
    "rdmanet.rpc.messenger",
    "rdmanet.rpc.unary",
)
# Who calls `help()` on a public name reads the docstring there. Those of all other modules are in their sources only.
DOCUMENTED = ("rdmanet._core", "rdmanet.rpc.stats")
# Python modules that are compiled, too: each has a .pxd with its C types.
compiled_python = sorted(
    stem.replace("/", ".") for stem, _ in map(os.path.splitext, cython_faces) if os.path.exists(f"{stem}.py")
)


class BuildExtensions(build_ext):
    """build_ext that leaves the device's libraries without Python's suffix and init symbol."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or True  # as many at once as there are processors
        self.in_tree = self.inplace  # run() sets that to False, and copies what was built

    def run(self):
        if self.in_tree:
            # A module that an older tree has compiled would be imported instead of its source.
            current = {self.get_ext_filename(ext.name) for ext in self.extensions}
            found = glob(f"rdmanet/**/*{sysconfig.get_config_var('EXT_SUFFIX')}", recursive=True)
            for path in set(found) - current:
                os.remove(path)
        super().run()

    def get_ext_filename(self, fullname):
        # Asked with and without the package's name in front.
        if fullname.rpartition(".")[2] in (DEVICE.rpartition(".")[2], FILES.rpartition(".")[2]):
            return os.path.join(*fullname.split(".")) + ".so"
        return super().get_ext_filename(fullname)

    def build_extension(self, ext):
        # Symbols are for whoever develops in the tree; in a wheel they are two thirds of its size.
        if not self.in_tree and not instrumented:
            # `zig cc` links its whole run-time, 100 KB compressed, unless what is unused is dropped.
            ext.extra_link_args = [
                *ext.extra_link_args,
                "-Wl,--strip-all",
                "-Wl,--gc-sections",
                "-Wl,--hash-style=gnu",
            ]
            if os.environ.get("RDMANET_CLANG"):
                ext.extra_compile_args = [*ext.extra_compile_args, *self.clangs_cflags(ext.name)]
        super().build_extension(ext)

    def clangs_cflags(self, name):
        if name in (DEVICE, FILES):
            return clang_cflags
        return [*clang_cflags, *clang_generated_cflags, *([] if name in BUSIEST else clang_smallest_cflags)]

    def get_export_symbols(self, ext):
        return [] if ext.name in (DEVICE, FILES) else super().get_export_symbols(ext)


class BuildPython(build_py):
    """build_py that gives the stub its docstrings, which the sources have once: editors read those of a stub."""

    def run(self):
        super().run()
        if not self.editable_mode:
            with open(os.path.join(self.build_lib, "rdmanet", "_core.pyi"), "w") as stub:
                stub.write(runpy.run_path("scripts/document-stub")["stub"]())


modules = [
    # What the others have in common, such as the type of their functions. Cython writes its C.
    Extension(SHARED, [], extra_compile_args=small_cflags, extra_link_args=ldflags),
    *(
        Extension(
            name,
            [name.replace(".", "/") + ".py"],
            depends=cython_faces,
            extra_compile_args=small_cflags if name.startswith(SMALL) else generated_cflags,
            extra_link_args=ldflags,
        )
        for name in compiled_python
    ),
    *(
        Extension(
            f"rdmanet.rpc.{name}",
            [f"rdmanet/rpc/{name}.pyx"],
            depends=cython_faces,
            extra_compile_args=generated_cflags,
            extra_link_args=ldflags,
        )
        for name in ("first_steps", "framing", "unary")
    ),
    Extension(
        "rdmanet.rpc.weighing",
        ["rdmanet/rpc/weighing.pyx"],
        include_dirs=["rdmanet/rpc"],
        depends=["rdmanet/rpc/weighing_keys.h"],
        extra_compile_args=[*cflags, "-Wno-unused-parameter", "-Wno-unused-function"],
        extra_link_args=ldflags,
    ),
    Extension(
        "rdmanet._core",
        ["rdmanet/_core.pyx", *sorted(glob("rdmanet/abi/*.c"))],
        include_dirs=["rdmanet/abi", "rdmanet/_pyx"],
        depends=abi_headers + cython_parts,
        extra_compile_args=generated_cflags,
        extra_link_args=ldflags,
    ),
]
device_cflags = ["-D_GNU_SOURCE=", "-fvisibility=hidden", "-pthread"]
PRELOADED = sorted(glob("rdmanet/soft/preload/*.c"))
device = Extension(
    DEVICE,
    sorted(set(glob("rdmanet/soft/*/*.c")) - set(PRELOADED)),
    include_dirs=["rdmanet/abi", "rdmanet/soft"],
    depends=[*abi_headers, *glob("rdmanet/soft/*/*.h"), "rdmanet/soft/soft.map"],
    extra_compile_args=[*cflags, *device_cflags],
    extra_link_args=[
        *ldflags,
        "-pthread",
        "-Wl,-soname,librdmanet_soft.so",
        "-Wl,--version-script,rdmanet/soft/soft.map",
        "-Wl,-z,nodelete",  # its engine thread and fork handlers outlive a dlclose
        "-Wl,-Bsymbolic",  # its calls of its own exports, where a real libibverbs is loaded, too
    ],
)
# What soft-run preloads. Without the sanitizers' run-time, which is the program's own affair.
files = Extension(
    FILES,
    PRELOADED,
    depends=glob("rdmanet/soft/preload/*.h"),
    extra_compile_args=[
        *(flag for flag in cflags if "sanitize" not in flag),
        *device_cflags,
    ],
    extra_link_args=["-pthread", "-ldl", "-Wl,-soname,librdmanet_files.so"],
)


def translated(modules, docstrings):
    """The modules, with their C written."""
    Options.docstrings = docstrings
    return cythonize(
        modules,
        compiler_directives=directives,
        shared_utility_qualified_name=SHARED,
        shared_utility_features_disabled=["MemoryView"],  # 40 KB, compressed, that nobody uses
    )


setup(
    ext_modules=[
        *translated([module for module in modules if module.name not in DOCUMENTED], docstrings=False),
        *translated([module for module in modules if module.name in DOCUMENTED], docstrings=True),
        device,
        files,
    ],
    cmdclass={"build_ext": BuildExtensions, "build_py": BuildPython},
)
