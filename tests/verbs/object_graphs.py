"""Random graphs of objects, of every kind at once and with work in flight, that end in random orders.

    python tests/verbs/object_graphs.py --count 10000          many, by all CPUs; seeds are printed
    python tests/verbs/object_graphs.py --end close --seed 17  that one again

A graph is a dictionary: the names are the keys of KINDS, in an order in which they can be made. Which of them a
graph has, what is under way when its end begins, and the order of the end follow from a seed. What a kind needs
is what its maker looks up; where the graph, or the device, has none of that it goes without.

The ends:

    forget   names are dropped one after the other; counts of references and the collector do the rest
    close    everything is closed, in rounds, since a parent refuses while it is needed
    mixed    closing, dropping, collecting, using what may be closed already, turns of the loop
    exit     the interpreter ends, with everything open and reachable in some way

After each, no C object is left, nothing was said to have leaked, and no exception went unheard. That no memory was
touched after its end is for a sanitizer to see: `make test-asan`.
"""

import argparse
import asyncio
import atexit
import builtins
import contextlib
import errno
import gc
import logging
import mmap
import os
import random
import re
import select
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import uvloop

from rdmanet import _core
from rdmanet.cm import CMEventChannel, CMEventType
from rdmanet.verbs import (
    AH,
    CQ,
    CQEX,
    DM,
    MW,
    PD,
    QP,
    SRQ,
    XRCD,
    AccessFlags,
    AHAttr,
    BufferPool,
    CompChannel,
    CQInitAttrEx,
    Device,
    MWBind,
    MWBindInfo,
    MWType,
    QPCap,
    QPInitAttr,
    QPInitAttrEx,
    QPType,
    RecvWR,
    SendOpsFlags,
    SendWR,
    SRQAttr,
    SRQInitAttr,
    SRQType,
    TransportType,
    WROpcode,
    inc_rkey,
    live_objects,
)
from rdmanet.verbs_async import AsyncBufferPool, AsyncCMID, AsyncCMListener, AsyncCQ, DeviceEvents, shared

# libuv opens a pipe for signals once a process; now, so that no graph seems to leak it.
uvloop.new_event_loop().close()

EVERYTHING = (
    AccessFlags.LOCAL_WRITE
    | AccessFlags.REMOTE_WRITE
    | AccessFlags.REMOTE_READ
    | AccessFlags.REMOTE_ATOMIC
    | AccessFlags.MW_BIND
)
# The device has none of these; or a queue is full.
LACKING = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EPROTONOSUPPORT, errno.ENOMEM}
CAP = QPCap(8, 8, 2, 2, 32)


class Graph:
    """One graph, and what it was made from."""

    def __init__(self, device: Device, address: str, seed: int) -> None:
        self.device = device
        self.address = address
        self.random = random.Random(seed)
        self.made: dict[str, Any] = {}
        self.stepped = False
        kernel = not device.library.embedded_device
        # Only the connection manager connects a kernel's iWARP queue pairs.
        self.by_hand = not (kernel and device.transport_type == TransportType.IWARP)
        # rxe waits for 50 s, and in vain, when a queue pair goes that a window is bound to.
        self.binds = not kernel
        for name, make in KINDS.items():
            if name in ALWAYS or self.random.random() < 0.7:
                with self.whatever_there_is():
                    self.made[name] = make(self)
        work = list(WORK)
        self.random.shuffle(work)
        for put in work:
            if self.random.random() < 0.7:
                with self.whatever_there_is():
                    put(self)

    def __getitem__(self, name: str) -> Any:
        return self.made[name]

    @contextlib.contextmanager
    def whatever_there_is(self):
        try:
            yield
        except OSError as exc:
            if exc.errno not in LACKING:
                raise
        except KeyError as exc:  # it needs another, which the graph has not
            if exc.args[0] not in self.made and exc.args[0] not in NAMES:
                raise

    def turn(self, times: int) -> None:
        """The event loop's."""
        loop = self.made.get("loop")
        for _ in range(times):
            if loop is None or loop.is_closed():
                return
            loop.call_soon(loop.stop)
            loop.run_forever()


# ---- What there is ------------------------------------------------------------------------------------


def gid_of(graph: Graph):
    table = graph["context"].gid_table(1)
    found = (entry for entry in table if str(entry.address) == graph.address)
    return next(found, table[0])


def to_itself(graph: Graph, qp: QP) -> QP:
    """Connected with itself, and ready to send."""
    if not graph.by_hand:
        raise KeyError("connected")
    gid = gid_of(graph)
    qp.to_init(access=EVERYTHING & ~AccessFlags.MW_BIND)
    qp.to_rtr(qp.qp_num, gid.gid, sgid_index=gid.gid_index)
    qp.to_rts()
    return qp


def datagrams(graph: Graph) -> QP:
    qp = QP(graph["pd"], QPInitAttr(graph["cq"], graph["cqex"], CAP, QPType.UD))
    qp.to_init(qkey=1)
    qp.to_rtr()
    qp.to_rts()
    return qp


def listener(graph: Graph):
    id = graph["events"].create_id()
    id.bind_addr((graph.address, 0))
    id.listen(8)
    return id


def client(graph: Graph):
    """An identifier that has begun to look for the listener's device, and no event of it is read."""
    id = graph["events"].create_id()
    id.resolve_addr(None, graph["listener"].local_addr, 60_000)
    return id


def loop(graph: Graph):
    made = graph.random.choice((asyncio.SelectorEventLoop, uvloop.new_event_loop))()
    made.set_exception_handler(handle_exception)
    return made


def handle_exception(loop, context) -> None:
    """Tasks that are pending at the end are intended here, and so are those whose result nobody fetches."""
    if "never retrieved" not in context["message"] and "was destroyed but" not in context["message"]:
        logging.getLogger("rdmanet").error("%s", context)


def exc_info(graph: Graph):
    """A traceback, whose frames hold everything."""
    made = graph.made  # noqa: F841
    try:
        graph["pd"].close()
    except OSError as exc:
        return exc


KINDS: dict[str, Callable[[Graph], Any]] = {
    "context": lambda g: g.device.open(),
    "pd": lambda g: PD(g["context"]),
    "channel": lambda g: CompChannel(g["context"]),
    "cq": lambda g: CQ(g["context"], 64, g["channel"]),
    "other_context": lambda g: g.device.open(),
    "other_pd": lambda g: PD(g["other_context"]),
    "cqex": lambda g: CQEX(g["context"], CQInitAttrEx(64, g["channel"])),
    # memory
    "mr": lambda g: g["pd"].alloc_mr(8192, EVERYTHING if g.binds else EVERYTHING & ~AccessFlags.MW_BIND),
    "borrowed": lambda g: g["pd"].reg_mr(bytearray(4096)),
    "readonly": lambda g: g["pd"].reg_mr(bytes(4096)),
    "twice": lambda g: g["pd"].reg_mr(g["mr"], EVERYTHING & ~AccessFlags.MW_BIND),
    "implicit": lambda g: g["pd"].reg_implicit(),
    "null": lambda g: g["pd"].alloc_null_mr(),
    "view": lambda g: memoryview(g["mr"])[100:200],
    "element": lambda g: g["mr"].at[200:300],
    "remote": lambda g: g["mr"].to_remote(0, 64).array("<u8"),
    "pool": lambda g: BufferPool(g["pd"], 100, 4),
    "lent": lambda g: g["pool"].acquire(),
    "lent_view": lambda g: memoryview(g["lent"])[10:20],
    "dm": lambda g: DM(g["context"], 4096),
    "dm_mr": lambda g: g["pd"].reg_dm_mr(g["dm"]),
    "mw_1": lambda g: MW(g["pd"], MWType.TYPE_1),
    "mw_2": lambda g: MW(g["pd"], MWType.TYPE_2),
    # queues
    "ah": lambda g: AH(g["pd"], AHAttr(gid_of(g).gid, gid_of(g).gid_index)),
    "srq": lambda g: SRQ(g["pd"], SRQAttr(8, 1)),
    "xrcd": lambda g: XRCD(g["context"]),
    "xrc_srq": lambda g: SRQ(g["pd"], SRQInitAttr(SRQAttr(8, 1), SRQType.XRC, g["xrcd"], g["cq"])),
    "xrc_target": lambda g: QP(g["pd"], QPInitAttrEx(qp_type=QPType.XRC_RECV, xrcd=g["xrcd"])),
    "xrc_sender": lambda g: QP(g["pd"], QPInitAttrEx(g["cq"], None, CAP, QPType.XRC_SEND)),
    "fresh": lambda g: QP(g["pd"], QPInitAttr(g["cq"], g["cq"], CAP)),
    "rc": lambda g: to_itself(g, QP(g["pd"], QPInitAttr(g["cq"], g["cq"], CAP))),
    "uc": lambda g: to_itself(g, QP(g["pd"], QPInitAttr(g["cq"], g["cq"], CAP, QPType.UC))),
    "ud": datagrams,
    "sharing": lambda g: to_itself(g, QP(g["pd"], QPInitAttr(g["cqex"], g["cq"], CAP, srq=g["srq"]))),
    "called": lambda g: to_itself(
        g,
        QP(
            g["pd"],
            QPInitAttrEx(g["cq"], g["cq"], CAP, send_ops_flags=SendOpsFlags.SEND | SendOpsFlags.RDMA_WRITE),
        ),
    ),
    "session": lambda g: g["called"].wr().__enter__(),
    "iterator": lambda g: g["cqex"].start_poll(),
    # the connection manager
    "events": lambda g: CMEventChannel(g.device.library),
    "other_events": lambda g: CMEventChannel(g.device.library),
    "listener": listener,
    "client": client,
    "unbound": lambda g: g["events"].create_id(),
    # on an event loop
    "loop": loop,
    "acq": lambda g: AsyncCQ(g["context"], 256, notifier=g["loop"], busy_poll=g.random.choice((None, 0))),
    "acq_2": lambda g: AsyncCQ(g["context"], 256, notifier=g["loop"]),
    "aqp": lambda g: g["acq"].create_qp(g["pd"], CAP, recv_cq=g.made.get("acq_2")),
    "aqp_2": lambda g: g["acq"].create_qp(g["pd"], CAP),
    "apool": lambda g: AsyncBufferPool(g["pd"], 100, 2, notifier=g["loop"]),
    "watching": lambda g: DeviceEvents(g["context"], notifier=g["loop"]),
    "alistener": lambda g: AsyncCMListener((g.address, 0), library=g.device.library, notifier=g["loop"]),
    "aclient": lambda g: AsyncCMID(library=g.device.library, notifier=g["loop"]),
    "tasks": lambda g: (g["loop"], [])[1],
    "raised": exc_info,
    "cycle": lambda g: g.made,
}
ALWAYS = {"context", "pd", "channel", "cq", "mr"}
# What a maker adds beside its own; and what it calls a step that the device does not take.
NAMES = {*KINDS, "connected", "cm_pd", "cm_cq", "client_qp", "server", "server_qp", "kept"}


# ---- What is under way ----------------------------------------------------------------------------------


def write(graph: Graph, **options: Any) -> SendWR:
    mr = graph["mr"]
    return SendWR(WROpcode.RDMA_WRITE, mr.at[:64], remote_addr=mr.address + 64, rkey=mr.rkey, **options)


def receive(graph: Graph) -> None:
    graph["rc"].post_recv([RecvWR(graph["mr"].at[:64]), RecvWR(graph["borrowed"])])


def receive_lent(graph: Graph) -> None:
    with graph["pool"].acquire() as buffer:
        graph["rc"].post_recv(RecvWR([buffer.sge(20, 50), graph["lent"]], wr_id=graph["pool"]))


def receive_shared(graph: Graph) -> None:
    graph["srq"].post_recv(RecvWR(graph["borrowed"], wr_id=graph.made))  # a cycle


def receive_xrc(graph: Graph) -> None:
    graph["xrc_srq"].post_recv(RecvWR(graph["mr"].at[:64], wr_id=graph["xrc_srq"]))


def writes(graph: Graph) -> None:
    names = [name for name in ("rc", "uc", "sharing") if name in graph.made]
    qp = graph[graph.random.choice(names or ["rc"])]
    qp.post_send([write(graph, wr_id=qp, flags=i % 2) for i in range(3)])


def send_to_nobody(graph: Graph) -> None:
    """No receive is there: it is tried again until the queue pair goes."""
    if graph.binds:
        graph["sharing"].post_send(SendWR(WROpcode.SEND, graph["readonly"].at[:8]))


def a_failure(graph: Graph) -> None:
    mr = graph["mr"]
    bad = SendWR(WROpcode.RDMA_WRITE, mr.at[:64], remote_addr=mr.address, rkey=mr.rkey ^ 0x100)
    graph["rc"].post_send([bad, write(graph)])


def bind_1(graph: Graph) -> None:
    if graph.binds:
        info = MWBindInfo(graph["mr"], None, 64, AccessFlags.REMOTE_WRITE)
        graph["rc"].bind_mw(graph["mw_1"], MWBind(info, wr_id=graph["mw_1"]))


def bind_2(graph: Graph) -> None:
    if graph.binds:
        mw, info = graph["mw_2"], MWBindInfo(graph["mr"], None, 64, AccessFlags.REMOTE_WRITE)
        graph["rc"].post_send(SendWR(WROpcode.BIND_MW, mw=mw, rkey=inc_rkey(mw.rkey), bind_info=info))


def send_datagram(graph: Graph) -> None:
    ud = graph["ud"]
    options = {"ah": graph["ah"], "remote_qpn": ud.qp_num, "remote_qkey": 1}
    ud.post_send(SendWR(WROpcode.SEND, graph["mr"].at[:8], **options))


def begin_session(graph: Graph) -> None:
    graph["session"].post(write(graph))
    if graph.random.random() < 0.5:
        graph["session"].__exit__(None, None, None)


def arm(graph: Graph) -> None:
    graph["cq"].req_notify()
    if "rc" in graph.made:
        graph["rc"].post_send(write(graph))
    graph["channel"].get_cq_event()  # and is not acknowledged


def keep_completions(graph: Graph) -> None:
    graph.made["kept"] = graph["cq"].poll()
    with contextlib.suppress(KeyError):
        graph.made["kept"] += graph["iterator"]


def step_connection(graph: Graph) -> None:
    """Some of the steps of a connection through the connection manager, however far it comes."""
    events, client = graph["events"], graph["client"]
    made = graph.made
    if graph.stepped:
        return
    graph.stepped = True

    def until(wanted: CMEventType):
        deadline = time.monotonic() + 60
        while True:
            if client.closed:
                raise ValueError("nothing comes for it any more")
            select.select([events], [], [], 1)
            event = events.get_event()
            if event is not None:
                event.raise_for_status()
                if event.type == wanted:
                    return event
            assert time.monotonic() < deadline, f"no {wanted.name}"

    def resolved():
        until(CMEventType.ADDR_RESOLVED)
        client.resolve_route(60_000)

    def routed():
        until(CMEventType.ROUTE_RESOLVED)
        made["cm_pd"] = PD(client.context)
        made["cm_cq"] = CQ(client.context, 64)
        made["client_qp"] = client.create_qp(made["cm_pd"], QPInitAttr(made["cm_cq"], made["cm_cq"], CAP))
        made["cm_mr"] = made["cm_pd"].alloc_mr(64)
        # With an element: siw takes no receive without one.
        made["client_qp"].post_recv(RecvWR(made["cm_mr"].at[:64], wr_id=client))

    def asked():
        client.connect(b"hello")
        made["server"] = until(CMEventType.CONNECT_REQUEST).id

    def answered():
        server = made["server"]
        made["server_qp"] = server.create_qp(made["cm_pd"], QPInitAttr(made["cm_cq"], made["cm_cq"], CAP))
        server.accept()

    def connected():
        while until(CMEventType.ESTABLISHED).id is not client:
            pass  # the server's may be the first
        made["client_qp"].post_send(SendWR(WROpcode.SEND, wr_id=made))

    def moved():
        client.migrate(made["other_events"])

    def parted():
        client.disconnect()

    steps = (resolved, routed, asked, answered, connected, moved, parted)
    for step in steps[: graph.random.randint(0, len(steps))]:
        step()


def asynchronous(begin: Callable[[Graph], Any]) -> Callable[[Graph], None]:
    """A coroutine that a task of the loop runs."""

    def put(graph: Graph) -> None:
        tasks = graph["tasks"]
        tasks.append(graph["loop"].create_task(begin(graph)))
        graph.turn(graph.random.randint(0, 3))
        if graph.random.random() < 0.3:
            tasks[-1].cancel()

    return put


def awaited(*operations: Callable[[Graph], Any]) -> list[Callable[[Graph], None]]:
    """Of a queue pair that is connected with itself, once; each operation is a task."""

    async def run(graph: Graph, operation: Callable[[Graph], Any]) -> None:
        qp = graph["aqp"]
        if qp.qp.state == 0:
            to_itself(graph, qp.qp)
        await operation(graph)

    def begin(operation):
        def of(graph: Graph):
            graph["aqp"]
            return run(graph, operation)

        return of

    return [asynchronous(begin(operation)) for operation in operations]


async def share(graph: Graph) -> None:
    async with graph["aqp"].shared(graph["mr"], AccessFlags.REMOTE_WRITE):
        await graph["loop"].create_future()


async def share_with_all(graph: Graph) -> None:
    async with shared(graph["pd"], bytearray(64)):
        await graph["loop"].create_future()


async def connect(graph: Graph) -> None:
    id = graph["aclient"]
    await id.resolve(graph["alistener"].local_addr, timeout=60)
    with PD(id.context) as pd, AsyncCQ(id.context, 64, notifier=graph["loop"]) as cq:
        with id.create_qp(pd, cq, CAP) as qp:
            await id.connect(b"hello")
            await qp.recv()


async def serve(graph: Graph) -> None:
    async for id in graph["alistener"]:
        with PD(id.context) as pd, AsyncCQ(id.context, 64, notifier=graph["loop"]) as cq:
            with id, id.create_qp(pd, cq, CAP) as qp:
                await id.accept()
                await qp.send()
                await id.disconnected()


async def iterate(things) -> None:
    async for _ in things:
        pass


async def receive_in_turn(graph: Graph) -> None:
    """Of two buffers, for three."""
    with await graph["apool"].get(50) as buffer:
        await graph["aqp"].recv(buffer)


WORK: list[Callable[[Graph], None]] = [
    receive,
    receive_lent,
    receive_shared,
    receive_xrc,
    writes,
    writes,
    send_to_nobody,
    a_failure,
    bind_1,
    bind_2,
    send_datagram,
    begin_session,
    arm,
    keep_completions,
    step_connection,
    *awaited(
        lambda g: g["aqp"].recv(g["mr"].at[:64]),
        lambda g: g["aqp"].recv(g["borrowed"]),
        lambda g: g["aqp"].send(g["mr"].at[:64]),
        lambda g: g["aqp"].write(b"inline", g["mr"].to_remote()),
        lambda g: g["aqp"].read(g["mr"].at[:64], g["mr"].to_remote(64)),
        lambda g: g["aqp"].fetch_and_add(g["remote"][3], 1),
        lambda g: g["aqp"].batch([write(g), write(g)]),
        lambda g: asyncio.gather(*(g["aqp"].recv(g["mr"].at[i]) for i in range(20))),  # more than it holds
        *[receive_in_turn] * 3,
        lambda g: g["acq"].wait(),
        lambda g: g["acq"].wait_wr(17),
        lambda g: iterate(g["acq"]),
        share,
    ),
    asynchronous(lambda g: share_with_all(g)),
    asynchronous(lambda g: iterate(g["watching"])),
    asynchronous(connect),
    asynchronous(serve),
]


# ---- How it ends ----------------------------------------------------------------------------------------


def end_by_forgetting(graph: Graph) -> None:
    made, choice = graph.made, graph.random
    if choice.random() < 0.5:
        # Whatever leads to the dictionary itself is broken: counts of references do the work.
        graph.made = made = dict(made)
        made.pop("cycle", None)
    while made:
        name = choice.choice(list(made))
        forget(made, name)
        if choice.random() < 0.05:
            gc.collect(choice.randint(0, 2))


def forget(made: dict[str, Any], name: str) -> None:
    if name == "loop":
        made[name].close()  # neither loop ends well otherwise
    del made[name]


def end_by_closing(graph: Graph) -> None:
    choice = graph.random
    left = [thing for thing in graph.made.values() if hasattr(thing, "close")]
    graph.made.clear()
    for _ in range(len(left) + 1):
        choice.shuffle(left)
        for thing in list(left):
            if close(thing):
                left.remove(thing)
        if not left:
            return
        gc.collect()  # tasks, which hold what they use
    raise AssertionError(f"these cannot be closed: {left}")


def close(thing: Any) -> bool:
    """Whether it is closed now; a parent refuses while it is needed."""
    try:
        thing.close()
    except OSError as exc:
        assert exc.errno in (errno.EBUSY, errno.EINVAL), exc  # rxe's EINVAL for a bound region
        assert not thing.closed
        return False
    except BufferError:  # a region whose memory somebody looks at
        return False
    thing.close()
    return getattr(thing, "closed", True)


def end_by_both(graph: Graph) -> None:
    made, choice = graph.made, graph.random
    while made:
        name = choice.choice(list(made))
        match choice.randint(0, 5):
            case 0 if hasattr(made[name], "close"):
                close(made[name])
            case 1:
                forget(made, name)
            case 2 if choice.random() < 0.2:
                gc.collect(choice.randint(0, 2))
            case 3:
                with contextlib.suppress(RuntimeError):  # the loop's tasks may fail as they like
                    graph.turn(2)
            case 4:
                with graph.whatever_there_is(), contextlib.suppress(OSError, ValueError, RuntimeError):
                    choice.choice(WORK)(graph)
            case 5:
                with contextlib.suppress(OSError, ValueError, RuntimeError):
                    use(made[name], choice)


def use(thing: Any, choice: random.Random) -> None:
    """Whatever can be asked of it, open or closed."""
    repr(thing)
    for attribute in choice.sample(dir(type(thing)), 5):
        if not attribute.startswith("_") and isinstance(thing, _core.Resource | AsyncCQ | AsyncCMID):
            getattr(thing, attribute)


ENDS = {"forget": end_by_forgetting, "close": end_by_closing, "mixed": end_by_both}


def run(device: Device, address: str, end: str, seed: int) -> None:
    """Make a graph, and end it; raises unless nothing is left of it."""
    complaints: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: complaints.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("rdmanet", "asyncio")]
    before = live_objects()
    hook, sys.unraisablehook = sys.unraisablehook, lambda args: complaints.append(unraisable(args))
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = Graph(device, address, seed)
            ENDS[end](graph)
            del graph
            gc.collect()
    finally:
        sys.unraisablehook = hook
        for logger in loggers:
            logger.removeHandler(handler)
    after = live_objects()
    left = {kind: after[kind] - before[kind] for kind in after if after[kind] != before[kind]}
    assert not left, f"{end} {seed}: left behind {left}"
    assert not complaints, f"{end} {seed}: {complaints}"


def unraisable(args: Any) -> str:
    text = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
    return f"{args.err_msg} {args.object!r}: {text}"


def leave(device: Device, address: str, seed: int) -> None:
    """Make a graph that is alive when the interpreter ends."""
    warnings.simplefilter("ignore")
    graph = Graph(device, address, seed)
    match graph.random.randint(0, 4):
        case 0:
            graph.made["itself"] = graph
        case 1:
            builtins.left_behind = graph  # type: ignore[attr-defined]
        case 2:
            atexit.register(graph.made.clear)
        case 3:
            atexit.register(graph.turn, 3)
        case 4:
            sys.modules["left_behind"] = graph  # type: ignore[assignment]


# By TCP a request may come when its memory is no region any more.
IN_VAIN = re.compile(r"^rdmanet .* asked for memory that it may not use.*\n", re.MULTILINE)


def exits(device: Device, address: str, seed: int) -> None:
    """Have a process do so. It must end well, and say nothing but what a peer that goes on asks for in vain."""
    with tempfile.TemporaryFile() as said:
        if (pid := os.fork()) == 0:
            os.dup2(said.fileno(), 2)
            leave(device, address, seed)
            sys.exit()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said.seek(0)
        text = IN_VAIN.sub("", said.read().decode(errors="replace"))
    assert status == 0 and not text, f"exit {seed}: the process ended with {status}: {text}"


# ---- Many of them, in processes ---------------------------------------------------------------------------

CURRENT = struct.Struct("=16sq")


class Worker:
    """A process with a share of the seeds; it says which one it is at, for the case that it dies of it."""

    def __init__(self, device: str, address: str, jobs: list[tuple[str, int]]) -> None:
        self.page = mmap.mmap(-1, CURRENT.size)
        self.pid = os.fork()
        if self.pid == 0:
            self.work(device, address, jobs)

    def work(self, name: str, address: str, jobs: list[tuple[str, int]]) -> None:
        gc.freeze()
        # Those that leave first: their process is one that has not used the device yet.
        for end, seed in sorted(jobs, key=lambda job: job[0] != "exit"):
            self.page[:] = CURRENT.pack(end.encode(), seed)
            if end != "exit":
                run(find(name), address, end, seed)
            else:
                exits(find(name), address, seed)
        sys.exit()

    def wait(self) -> str | None:
        """What it died of."""
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if status == 0:
            return None
        end, seed = CURRENT.unpack(self.page[:])
        return f"--end {end.rstrip(bytes(1)).decode()} --seed {seed}: the process ended with {status}"


def find(name: str) -> Device:
    return next(device for device in _core.devices() if device.name == name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Random graphs of objects, ended in random orders.")
    parser.add_argument("--count", type=int, help="how many graphs")
    parser.add_argument("--seed", type=int, help="of the first one; by default another each time")
    parser.add_argument("--end", choices=[*ENDS, "exit"], help="by default all, a few of them exits")
    parser.add_argument("--device", default="soft0")
    parser.add_argument("--address", default="127.0.0.1")
    options = parser.parse_args()
    count = options.count or (1 if options.seed is not None else 100)
    first = random.SystemRandom().randrange(10**9) if options.seed is None else options.seed
    print(f"{count} graphs from seed {first} on, by {_core.__file__}", flush=True)
    ends = [options.end] if options.end else [*list(ENDS) * 10, "exit"]
    jobs = [(ends[i % len(ends)], first + i) for i in range(count)]
    share = max(1, min(os.cpu_count() or 1, count))
    workers = [Worker(options.device, options.address, jobs[i::share]) for i in range(share)]
    if failed := [died for worker in workers if (died := worker.wait())]:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
