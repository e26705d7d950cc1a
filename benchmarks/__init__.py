"""Measure the cost of a message over RDMA, and over the sockets that it replaces.

cases.py defines what is measured, and the goals; worker.py is each of the two processes of a measurement; __main__.py
starts them, interleaves the cases and keeps every repetition; report.py makes tables; count.py counts calls instead of
time. cacheline.c measures the distance of the two CPUs, to judge the state of the machine.

The others are programs of their own. touch.c is what programs that work on their bytes do in them.
"""
