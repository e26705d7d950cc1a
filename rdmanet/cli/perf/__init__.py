"""measure verbs, streams and calls, beside TCP and Unix sockets; on one machine or between two

usage: rdmanet perf [TEST ...]              both processes on this machine
       rdmanet perf server                  wait for a client of another machine
       rdmanet perf HOST [TEST ...]         be that client

Theory
------
Two processes measure: a client, which sends and takes the times, and a server, which answers or receives. On one
machine the client starts the server; each has a CPU of its own, since a process that polls needs one. They talk over a
socket of their own (control.py). For each test and size the client sends what is to be done; both sides set up, measure
and give everything back.

Verbs are posted and polled by a loop in C (rdmanet/_pyx/traffic.pxi), so that what is measured is the device: the
numbers can be compared with those of perftest, and letters, header and columns are the same where they mean the same.
Streams and calls are measured from Python, since that is how they are used. Times go into a histogram of constant size
(rdmanet/_pyx/histogram.pxi), so percentiles are there after a minute as after a thousand messages.

A number alone says little. So each comes with what it cost (CPU time of both sides), with its least over time, with
what the same costs over TCP and Unix sockets, if that was measured, and with what has made it wrong.

General layout
--------------
    kinds           the tests by name
    control         what the two sides say to each other, and what is checked of it
    pairs           queue pairs and memory of one side
    verbs_client, verbs_server, streams, calls     the runs; paced: those at a rate
    server, client  a session: all runs
    conditions      what makes a measurement wrong
    guard           what a server does for strangers
    results         what was measured, as JSON; limits: --require
    tables, plot    what people see; hgrm: what HdrHistogram's programs read
    options         the arguments; plan: those of a file; command: from them to the exit status
"""

import argparse

from rdmanet.cli.perf.options import add_arguments

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    from rdmanet.cli.perf.command import run

    return run(args)
