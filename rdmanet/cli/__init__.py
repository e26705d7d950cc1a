"""The command line: `rdmanet COMMAND`, or `python -m rdmanet COMMAND`.

General layout. Each command has a module: devices.py, gids.py, doctor.py, ss.py, run.py, call.py, demo.py, proxy.py,
secret.py and soft_run.py, and perf has a folder. It defines add_arguments(parser) and run(args), which returns the exit
status. checks.py and variables.py have the checks of doctor, finding.py what they say; endpoints.py and relay.py have
the parts of proxy, asking.py what ss asks of others, pcapng.py and wireshark.lua what trace writes for Wireshark.
command_line.py chooses among the commands. everywhere/ is what `rdmanet run` puts into each Python of a program, and
imports no more than it needs.

fabrics.py lets one program run over RDMA, TCP and Unix sockets; workloads.py generates the traffic that is measured
over each (perf, demo and the benchmarks use both); text.py formats tables and progress; interrupts.py handles Ctrl-C.

An error is one line on standard error. A traceback is a bug of rdmanet.
"""
