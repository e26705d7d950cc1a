"""Wants the arena of the process that has a port: argv is the port, how often to try, and who it is.

Half of the attempts are those of new processes, which nobody has refused yet. Says how many `attempts` there were,
the `refusals`, and of the `arena` what it begins with, if it was to be had.
"""

import os

from link_words import ask_for_arena, become_or_end

port, count, *roles = argv
become_or_end(roles, say)


def attempt():
    """The first bytes of the arena, and why there are none."""
    arena, why = ask_for_arena(port)
    return (os.pread(arena, 8, 0).hex(), "") if arena is not None else ("", why)


def attempt_in_child():
    ours, its = os.pipe()
    if not os.fork():
        os.write(its, ",".join(attempt()).encode())
        os._exit(0)
    os.close(its)
    with open(ours) as file:
        said = file.read().split(",")
    os.wait()
    return said


results = [attempt_in_child() if number % 2 == 0 else attempt() for number in range(int(count))]
arenas = [arena for arena, _ in results if arena]
say(
    attempts=len(results),
    arenas=len(arenas),
    magic=arenas[0] if arenas else "",
    refusals=[why for _, why in results],
)
