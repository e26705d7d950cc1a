"""What a message costs over RDMA and over the sockets it replaces, measured side by side.

cases.py says what is measured and the goals; worker.py is either of the two processes of a measurement;
__main__.py starts them, interleaves the cases and keeps every repetition; report.py makes tables of that;
count.py counts calls instead of time. cacheline.c tells in which state the machine was.
"""
