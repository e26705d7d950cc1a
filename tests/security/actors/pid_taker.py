"""A process that has got this pid, which is free: argv. Says that it `has` it, or why it is `unfit`."""

import os

wanted, tries = int(argv[0]), 1000
for _ in range(tries):
    try:
        with open("/proc/sys/kernel/ns_last_pid", "w") as last:
            last.write(str(wanted - 1))
    except OSError as exc:
        say(unfit=f"no pid is to be chosen: {exc}")
        break
    child = os.fork()
    if not child:
        if os.getpid() == wanted:
            say(has=wanted)
            hear()
        os._exit(0)
    os.waitpid(child, 0)  # the right one ends with the test
    if child == wanted:
        break
else:
    say(unfit=f"other processes were faster, {tries} times")
