"""Our declarations of the verbs ABI against the distribution's, byte by byte.

Every struct, member and constant that our two headers declare becomes one probe, a line of C that
prints a number. The same probes are compiled twice, with our headers and with rdma-core's, and the
two tables must agree. Two kinds of difference are right and are settled here, not ignored:

- A library older than the declarations lacks what came later. Those probes do not compile against
  its headers; they are named in NEWER, and anything else that fails to compile is an error.
- verbs_context grows at its front, so its members are measured from its end, and the structs in
  EXTENSIBLE may be longer with us than with an older library.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ['"verbs.h"', '"rdma_cma.h"']
THEIRS = ["<infiniband/verbs.h>", "<infiniband/sa.h>", "<rdma/rdma_cma.h>"]

EXTENSIBLE = {
    "verbs_context",
    "ibv_cq_init_attr_ex",
    "ibv_device_attr_ex",
    "ibv_parent_domain_init_attr",
    "ibv_port_attr",
    "ibv_qp_ex",
    "ibv_qp_init_attr_ex",
}

# Later than rdma-core 44, the oldest that these tests are run against.
NEWER = re.compile(
    r"IBV_(WC_FLUSH|WR_FLUSH|ACCESS_FLUSH_\w+|FLUSH_\w+|QP_EX_WITH_FLUSH|EVENT_DEVICE_SPEED_CHANGE)"
    r"|RDMA_CM_EVENT_(ADDRINFO_RESOLVED|ADDRINFO_ERROR|USER|INTERNAL)"
    r"|verbs_context\.(free_buf|alloc_buf|dm_export_dmabuf_fd|reg_mr_ex|dealloc_dmah|alloc_dmah)"
    r"|ibv_qp_ex\.wr_flush|ibv_port_attr\.active_speed_ex|rdma_cm_event\.param\.arg"
)


def have_headers() -> bool:
    probe = "".join(f"#include {name}\n" for name in THEIRS)
    return (
        shutil.which("cc") is not None
        and subprocess.run(
            ["cc", "-fsyntax-only", "-xc", "-"], check=False, input=probe, text=True, capture_output=True
        ).returncode
        == 0
    )


pytestmark = pytest.mark.skipif(
    not have_headers(), reason="needs cc, libibverbs-dev and librdmacm-dev to compare with"
)


def declarations() -> str:
    text = "".join((ROOT / "rdmanet/abi" / name.strip('"')).read_text() for name in OURS)
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def members(body: str, prefix: str = "") -> Iterator[str]:
    """The member paths of a struct's body; unnamed parts lend their members to the whole."""
    depth, start = 0, 0
    for i, char in enumerate(body):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if char != ";" or depth:
            continue
        declaration, start = body[start:i].strip(), i + 1
        if nested := re.match(r"(?:struct|union) *\{(.*)\} *(\w*)$", declaration, re.DOTALL):
            name = nested[2]
            if name:
                yield prefix + name
            yield from members(nested[1], f"{prefix}{name}." if name else prefix)
        elif pointer := re.search(r"\(\*(\w+)\)", declaration):
            yield prefix + pointer[1]
        else:
            yield from (prefix + name for name in re.findall(r"(\w+)(?:\[\w+\])*(?:,|$)", declaration))


def probes() -> dict[str, str]:
    """Probe name to the C expression that gives its number."""
    text, found = declarations(), {}
    for match in re.finditer(r"^(struct|union) (\w+) \{\n(.*?)^\};", text, re.MULTILINE | re.DOTALL):
        kind, name, body = match.groups()
        whole = f"{kind} {name}"
        found[f"{name} size"] = f"sizeof({whole})"
        for member in members(body):
            offset = f"offsetof({whole}, {member})"
            found[f"{name}.{member}"] = f"sizeof({whole}) - {offset}" if name == "verbs_context" else offset
            found[f"{name}.{member} size"] = f"sizeof((({whole} *)0)->{member})"
    for match in re.finditer(r"^enum \w* ?\{(.*?)\};", text, re.MULTILINE | re.DOTALL):
        for constant in re.findall(r"(?:^|,)\s*([A-Z]\w+)", match[1]):
            found[constant] = f"(long long)({constant})"
    for constant in re.findall(r"^#define ((?:IBV|RDMA|RAI)_\w+) ", text, re.MULTILINE):
        found[constant] = f"(long long)({constant})"
    return found


def table(headers: list[str], wanted: dict[str, str], tmp_path: Path) -> dict[str, int]:
    """The probes' numbers; a probe that does not compile against these headers is left out."""
    head = [f"#include {name}" for name in [*headers, "<stddef.h>", "<stdio.h>"]] + ["int main(void) {"]
    left = list(wanted.items())
    for _ in range(2):
        source = tmp_path / "probe.c"
        lines = [f'printf("{name}\\t%lld\\n", (long long)({value}));' for name, value in left]
        source.write_text("\n".join([*head, *lines, "}"]))
        done = subprocess.run(
            ["cc", f"-I{ROOT}/rdmanet/abi", "-fmax-errors=0", str(source), "-o", str(tmp_path / "probe")],
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode == 0:
            break
        bad = {int(line) - len(head) - 1 for line in re.findall(r"probe\.c:(\d+):\d+: error", done.stderr)}
        left = [probe for i, probe in enumerate(left) if i not in bad]
    else:
        pytest.fail(done.stderr)
    output = subprocess.run([str(tmp_path / "probe")], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in (line.split("\t") for line in output.splitlines())}


def test_same_sizes_offsets_and_values(tmp_path: Path) -> None:
    wanted = probes()
    assert len(wanted) > 1500, "the parser of our own headers lost something"
    ours = table(OURS, wanted, tmp_path)
    theirs = table(THEIRS, wanted, tmp_path)

    assert ours.keys() == wanted.keys()
    unknown = {name for name in ours.keys() - theirs.keys() if not NEWER.match(name)}
    assert not unknown, "not in rdma-core's headers"

    def agrees(name: str) -> bool:
        struct, _, what = name.partition(" ")
        if what == "size" and struct in EXTENSIBLE:
            return ours[name] >= theirs[name]
        return ours[name] == theirs[name]

    differing = {name: (ours[name], theirs[name]) for name in theirs if not agrees(name)}
    assert not differing, "ours, theirs"
