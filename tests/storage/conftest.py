"""A process that dies at its n-th operation on files, without dying."""

import contextlib
import sys
import threading

import pytest

OPERATIONS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}


class Killed(BaseException):
    """Raised at one operation and at every later one: nothing can be tidied up, as after SIGKILL."""


class Deaths:
    def __init__(self):
        self.left = None
        self._thread = threading.get_ident()
        sys.addaudithook(self._hook)  # for good; it does nothing while `left` is None

    def _hook(self, event, args):
        if self.left is None or event not in OPERATIONS or threading.get_ident() != self._thread:
            return
        if self.left == 0:
            raise Killed(event)
        self.left -= 1

    @contextlib.contextmanager
    def after(self, operations):
        """Die after so many of them; `died` of what is yielded says whether it came to that."""
        outcome = type("Outcome", (), {"died": False})()
        self.left = operations
        try:
            yield outcome
        except Killed:
            outcome.died = True
        finally:
            self.left = None


@pytest.fixture(scope="session")
def deaths():
    return Deaths()
