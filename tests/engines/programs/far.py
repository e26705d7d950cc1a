"""One engine of a pair whose other process is on another host, or in another container. They exchange addresses by TCP.

usage: far.py ENGINE serve HERE
       far.py ENGINE call HERE THERE
"""

import importlib
import sys
from multiprocessing.connection import Client, Listener

import pair

PORT = 7471


def serve(engine):
    with Listener((pair.HOST, PORT)) as listener:
        print("ready", flush=True)
        with listener.accept() as pipe:
            engine.serve(pipe)


def call(engine, there):
    with Client((there, PORT)) as pipe:
        initiator = engine.Initiator(pipe)
        engine.read_and_write(initiator)
        print(f"by TCP: {pair.carried(('bytes_stream',))} of {pair.carried()} bytes")
        pipe.send("end")
    print("done")


if __name__ == "__main__":
    name, side, pair.HOST, *there = sys.argv[1:]
    engine = importlib.import_module(f"{name}_pair")
    {"serve": serve, "call": call}[side](engine, *there)
