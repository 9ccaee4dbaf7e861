"""Attacks 1-20 and 96: files outside, links and handles to them, metadata, quotas, traps for whoever reads artifacts."""

import os
import shutil
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnwise.ext.sandbox.results import ExecutionStatus

SECRET = "canary-content"

READING = {
    "03 canary": "return open(CANARY).read()",
    "04 list": "return os.listdir(FOLDER)",
    "05 symlink": "os.symlink(CANARY, 'link'); return open('link').read()",
    "06 hard link": "os.link(CANARY, 'hard'); return open('hard').read()",
    "06 hard link of a link": "os.link(CANARY, 'hard', follow_symlinks=False); return open('hard').read()",
    "07 dots": "return open('../' * 12 + CANARY[1:]).read()",
    "07 dots and chdir": "os.chdir('/'); return open(CANARY[1:]).read()",
    "07 chdir into it": "os.chdir(FOLDER); return open('canary').read()",
    "07 proc root": "return open('/proc/self/root' + CANARY).read()",
    "07 proc cwd": "return open('/proc/self/cwd/' + '../' * 12 + CANARY[1:]).read()",
    "08 open": "n = syscall('open', CANARY.encode(), 0); return os.read(n, 99)",
    "08 C library": """
        stream = libc.fopen; stream.restype = ctypes.c_void_p
        handle = stream(CANARY.encode(), b'r')
        if not handle: raise OSError(ctypes.get_errno(), 'fopen')
        return 'opened'""",
    "08 path descriptor": "n = os.open(CANARY, os.O_PATH); return open(f'/proc/self/fd/{n}').read()",
    "08 relative to a folder": """
        n = os.open(FOLDER, os.O_PATH)
        return os.read(os.open('canary', os.O_RDONLY, dir_fd=n), 99)""",
    "09 openat2": "return os.read(syscall('openat2', -100, CANARY.encode(), struct.pack('QQQ', 0, 0, 0), 24), 99)",
    "09 name of a handle": """
        handle, mount = ctypes.create_string_buffer(struct.pack('Ii', 128, 0) + bytes(128)), ctypes.c_int()
        return syscall('name_to_handle_at', -100, CANARY.encode(), handle, ctypes.byref(mount), 0)""",
    "16 its own kind of folder": "return os.listdir(POOL)",
}
WRITING = {
    "12 write": "open(CANARY, 'a').write('x'); return 'written'",
    "12 create": "open(FOLDER + '/made', 'w').write('x'); return 'made'",
    "12 folder": "os.mkdir(FOLDER + '/made'); return 'made'",
    "12 through a link": "os.symlink(FOLDER + '/made', 'out'); open('out', 'w').write('x'); return 'made'",
    "12 temporary file": "return os.open(FOLDER, os.O_TMPFILE | os.O_RDWR)",
    "13 truncate": "os.truncate(CANARY, 0); return 'cut'",
    "13 open and cut": "os.open(CANARY, os.O_WRONLY | os.O_TRUNC); return 'cut'",
    "14 rename": "os.rename(CANARY, FOLDER + '/made'); return 'moved'",
    "14 rename inside": "os.rename(CANARY, 'mine'); return 'moved'",
    "14 rename onto": "open('mine', 'w').write('x'); os.rename('mine', CANARY); return 'moved'",
    "14 exchange": "open('mine', 'w'); return syscall('renameat2', -100, b'mine', -100, CANARY.encode(), 2)",
    "14 unlink": "os.unlink(CANARY); return 'gone'",
    "14 link": "open('mine', 'w'); os.link('mine', FOLDER + '/made'); return 'made'",
    "14 symlink": "os.symlink('x', FOLDER + '/made'); return 'made'",
    "16 /tmp": "os.close(os.open('/tmp/turnwise-made', os.O_CREAT | os.O_WRONLY)); return os.path.realpath('/tmp')",
    "16 /dev/shm": "open('/dev/shm/turnwise-made', 'w'); return 'made'",
    "16 /var/tmp": "open('/var/tmp/turnwise-made', 'w'); return 'made'",
    "17 fifo": "os.mkfifo(FOLDER + '/made'); return 'made'",
    "17 socket file": "syscall('mknodat', -100, (FOLDER + '/made').encode(), 0o140600, 0); return 'made'",
}
METADATA = {
    "14 chmod": "os.chmod(CANARY, 0o777)",
    "14 fchmodat2": "syscall('fchmodat2', -100, CANARY.encode(), 0o777, 0)",
    "14 utime": "os.utime(CANARY, (1, 1))",
    "14 xattr": "os.setxattr(CANARY, 'user.mine', b'x')",
}


class Bait:
    """Files which everybody may read and write, so that only the sandbox protects them."""

    def __init__(self, folder: Path, pool: str) -> None:
        self.folder = folder
        self.canary = folder / "canary"
        folder.chmod(0o777)
        self.canary.write_text(SECRET)
        self.canary.chmod(0o666)
        self.names = {"CANARY": str(self.canary), "FOLDER": str(folder), "POOL": pool}
        self.before = self.look()

    def look(self) -> tuple[object, ...]:
        found = os.stat(self.canary)
        content = (found.st_ino, found.st_mode, found.st_uid, found.st_mtime_ns, os.listxattr(self.canary))
        made = [path for path in ("/tmp", "/dev/shm", "/var/tmp") if os.path.exists(f"{path}/turnwise-made")]
        return sorted(os.listdir(self.folder)), self.canary.read_text(), *content, made


@pytest.fixture
def bait(request: pytest.FixtureRequest) -> Iterator[Bait]:
    name = "arena" if "arena" in request.fixturenames else "defenceless"
    arena = request.getfixturevalue(name)
    folder = Path(tempfile.mkdtemp(prefix="turnwise-bait-"))
    yield Bait(folder, "/proc/1/root/tmp" if arena.namespaces else str(Path(arena.place).parent))
    shutil.rmtree(folder)
    for path in ("/tmp", "/dev/shm", "/var/tmp"):
        Path(path, "turnwise-made").unlink(missing_ok=True)


def test_files_outside_cannot_be_read(arena, bait):
    for name, attempt in arena.attacks(READING, **bait.names).items():
        assert attempt.refused, (name, attempt)
        assert SECRET not in attempt.result.text(), name


def test_files_outside_cannot_be_written(arena, bait):
    for name, attempt in arena.attacks(WRITING, **bait.names).items():
        own_tmp = attempt.found == "/scratch"  # with namespaces /tmp may be the session's own folder
        assert attempt.refused or own_tmp, (name, attempt)
    assert bait.look() == bait.before


def test_metadata_outside_cannot_be_changed(arena, bait):
    for name, attempt in arena.attacks(METADATA, **bait.names).items():
        assert attempt.result.status is ExecutionStatus.OK or attempt.refused, (name, attempt)
    assert bait.look() == bait.before


def test_an_open_file_is_read_and_written_without_a_sandbox(defenceless, bait):
    """That the bait can be taken; the long tail tries every one of the attacks."""
    for name, body in (("03 canary", READING["03 canary"]), ("12 write", WRITING["12 write"])):
        assert defenceless.attack(body, **bait.names).found is not None, name
    assert bait.look() != bait.before


@pytest.mark.long
@pytest.mark.parametrize("body", [*READING.values(), *WRITING.values()], ids=[*READING, *WRITING])
def test_these_are_attacks(defenceless, bait, body):
    attempt = defenceless.attack(body, **bait.names)
    assert attempt.found is not None, attempt


@pytest.mark.long
@pytest.mark.parametrize("body", METADATA.values(), ids=METADATA)
def test_these_change_metadata(defenceless, bait, body):
    os.chown(bait.canary, defenceless.uid, -1)  # only an owner may do this without capabilities
    bait.before = bait.look()
    defenceless.attack(body, **bait.names)
    assert bait.look() != bait.before


SYSTEM = (
    "/etc/shadow", "/etc/passwd", "/etc/hostname", "/root", "/home", "/", "/etc", "/var", "/proc", "/sys", "/run", "/boot",
)  # fmt: skip
HIDDEN = {
    "etc", "home", "proc", "var", "work", "boot", "sys", "run", ".ssh", ".bashrc", ".profile", ".cache",
}  # fmt: skip


def test_the_system_cannot_be_read(arena):
    """1, 2, 4."""
    bodies = {
        path: f"return os.listdir({path!r})" if os.path.isdir(path) else f"return open({path!r}).read()"
        for path in SYSTEM
    }
    for path, attempt in arena.attacks(bodies).items():
        if arena.namespaces and path in ("/", "/root"):  # its own root, with the folders on the way to Python
            listed = set(eval(attempt.found)) if attempt.found else set()
            assert not listed & HIDDEN, (path, listed)
        else:
            assert attempt.refused, (path, attempt)


def test_a_project_that_python_only_links_to_cannot_be_read(arena):
    """15."""
    import turnwise

    attempt = arena.attack(f"return open({turnwise.__file__!r}).read()")
    assert attempt.refused, attempt


def test_packages_cannot_be_written(arena):
    """15: nor can a file be put where Python looks for modules."""
    attempt = arena.attack("import numpy; return open(numpy.__file__, 'a')")
    assert attempt.refused, attempt
    attempt = arena.attack("import os.path, json; return open(os.path.dirname(json.__file__) + '/evil.py', 'w')")
    assert attempt.refused, attempt


def test_existence_of_files_outside(arena, bait):
    """10: without a file system of its own a session can tell that a file is there, and nothing more."""
    attempt = arena.attack("return os.stat(CANARY).st_size", **bait.names)
    if arena.namespaces:
        assert attempt.refused, attempt
    else:
        assert attempt.found == str(len(SECRET))


def test_no_descriptor_of_the_host_is_inherited(arena):
    """11: 0 is empty, 1 and 2 are the session's own, 3 leads to the host; everything else is its own output again."""
    listing = """
        import stat
        found = []
        for number in range(1024):
            try:
                status = os.fstat(number)
            except OSError:
                continue
            found.append((number, stat.S_IFMT(status.st_mode), status.st_dev, status.st_ino))
        output = found[1][2:]
        sockets = [number for number, kind, *_ in found if kind == stat.S_IFSOCK]
        others = [one for one in found if one[0] > 3 and one[2:] != output]
        (sockets, others, os.read(0, 1), os.lseek(1, 0, 2))
    """
    assert arena.run(listing).value == f"([3], [], b'', {64 * 1024})"


def test_devices_cannot_be_made(arena):
    """17."""
    kinds = (0o020600, 0o060600)
    bodies = {oct(kind): f"os.mknod('device', {kind}, os.makedev(1, 1)); return 'made'" for kind in kinds}
    for kind, attempt in arena.attacks(bodies).items():
        assert attempt.refused, (kind, attempt)


FILLING = {
    "18 many files": "for i in range(6): os.posix_fallocate(os.open(str(i), os.O_CREAT | os.O_WRONLY), 0, SCRATCH // 4)",
    "18 one file": "os.posix_fallocate(os.open('a', os.O_CREAT | os.O_WRONLY), 0, SCRATCH + 4096)",
    "18 deleted while open": """
        for i in range(6):
            n = os.open('a', os.O_CREAT | os.O_WRONLY)
            os.unlink('a')
            os.posix_fallocate(n, 0, SCRATCH // 4)""",
    "18 without a name": """
        for i in range(6):
            os.posix_fallocate(os.open('.', os.O_TMPFILE | os.O_WRONLY), 0, SCRATCH // 4)""",
    "18 below a long path": """
        for i in range(18):
            os.mkdir('d' * 250)
            os.chdir('d' * 250)
        for i in range(6):
            os.posix_fallocate(os.open(str(i), os.O_CREAT | os.O_WRONLY), 0, SCRATCH // 4)""",
    "18 in a folder nobody lists": """
        os.mkdir('hidden', 0o300)
        for i in range(6):
            os.posix_fallocate(os.open(f'hidden/{i}', os.O_CREAT | os.O_WRONLY), 0, SCRATCH // 4)""",
    "19 files": "for i in range(1000): os.close(os.open(str(i), os.O_CREAT | os.O_WRONLY))",
    "19 folders": "for i in range(1000): os.mkdir(str(i))",
    "19 links": "for i in range(1000): os.symlink('x', str(i))",
    "19 hard links": "open('a', 'w')\nfor i in range(1000): os.link('a', str(i))",
    "20 past the size of a file": "os.pwrite(os.open('a', os.O_CREAT | os.O_WRONLY), b'x', 1 << 40); return 'written'",
    "20 sparse": "os.truncate(os.open('a', os.O_CREAT | os.O_WRONLY), 1 << 40); return 'written'",
}


@pytest.mark.parametrize("name", FILLING)
def test_the_scratch_folder_has_a_quota(arena, name):
    """A session that takes more than its share is refused by the kernel, or ended by the host."""
    attempt = arena.attack(textwrap.dedent(FILLING[name]).strip() + "\nreturn 'filled'")
    ended = attempt.result.status is ExecutionStatus.KILLED
    hard_links = arena.namespaces and name == "19 hard links"  # of one inode: they take no room there
    assert ended or attempt.refused or hard_links, attempt


def test_a_tree_too_deep_to_walk_is_removed(arena):
    """19: deeper than any recursion of the host."""
    try:
        result = arena.run("for i in range(3000): os.mkdir('a'); os.chdir('a')")
        assert result.status in (ExecutionStatus.KILLED, ExecutionStatus.ERROR), result
    finally:
        for folder in [] if arena.namespaces else Path(arena.place).parent.iterdir():
            if folder.name != Path(arena.place).name:
                os.system(f"rm -rf {folder}")


TRAPS = {
    "a link": "os.symlink(CANARY, 'a.png')",
    "a dangling link": "os.symlink('nowhere', 'a.png')",
    "a loop": "os.symlink('a.png', 'a.png')",
    "a pipe": "os.mkfifo('a.png')",
    "a folder": "os.mkdir('a.png')",
    "garbage": "open('a.png', 'wb').write(os.urandom(1000))",
    "nothing": "open('a.png', 'wb')",
    "a huge header": "open('a.ppm', 'wb').write(b'P6 999999 999999 255 ')",
}


def test_traps_for_whoever_collects_images(arena, bait):
    """96."""
    for name, trap in TRAPS.items():
        result = arena.run(trap, names=bait.names)
        assert result.status in (ExecutionStatus.OK, ExecutionStatus.DENIED), (name, result)  # a pipe cannot be made
        assert result.images == (), (name, result)


def test_an_honest_image_is_collected(arena):
    result = arena.run("from PIL import Image; Image.new('L', (3, 2), 9).save('a.png')")
    assert [(one.name, one.size, one.pixels) for one in result.images] == [("a.png", (3, 2), b"\x09" * 6)]
