"""Runs a command as the child of another process that may be killed at any time: `server_guard.py COMMAND...`.

Standard input is a pipe from that process. When it closes, the command's whole session ends, kindly and then not. This
file is run by its path, so that it starts at once: it needs nothing but the standard library.
"""

import os
import select
import signal
import subprocess
import sys
import time

KIND_SECONDS = 10.0
LAST_SECONDS = 1.0
"""For workers after their server has ended, and for the system to bury the dead."""


def main(command: list[str]) -> int:
    """The command's exit code, or 0 when it was ended from above."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which says when we are to end
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while server.poll() is None:
            readable, _, _ = select.select([0], [], [], 0.2)
            if readable and not os.read(0, 4096):
                break
    finally:
        ended = server.poll()
        end(server)
    return ended or 0


def end(server: "subprocess.Popen[bytes]") -> None:
    """Its session, whoever of it is left: workers may outlive the server."""
    for number, seconds in ((signal.SIGTERM, KIND_SECONDS), (signal.SIGKILL, LAST_SECONDS)):
        until, ended = time.monotonic() + seconds, False
        try:
            os.killpg(server.pid, number)
            while time.monotonic() < until:
                if server.poll() is not None:
                    os.killpg(server.pid, 0)  # is a worker left?
                    until, ended = (until, True) if ended else (time.monotonic() + LAST_SECONDS, True)
                time.sleep(0.02)
        except ProcessLookupError:
            break
    server.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
