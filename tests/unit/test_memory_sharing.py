"""Buffers from process to process: who is let in, what is refused and why, who is noticed to be gone, nothing left."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fabric_kv import ClosedError, ConfigError, Engine, MemoryRegion, SharingError
from fabric_kv.memory import BufferServer, HostBuffer, import_buffers, wire
from fabric_kv.memory.buffer import BufferInfo

LONG = 60.0


def held() -> tuple[int, int]:
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:fabric_kv")


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not done():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


@pytest.fixture(autouse=True, scope="module")
def _nothing_of_others() -> None:
    gc.collect()  # what other modules have left must not go in the middle of a test


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = held()
    threads = threading.active_count()
    yield
    if held() != before:
        gc.collect()
    until(lambda: held() == before and threading.active_count() == threads)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "rank")


@pytest.fixture
def buffers() -> Iterator[dict[str, HostBuffer]]:
    buffers = {f"layer{i}": HostBuffer.allocate(5000 + i) for i in range(3)}
    for i, buffer in enumerate(buffers.values()):
        buffer.array[:] = i + 1
    yield buffers
    for buffer in buffers.values():
        buffer.close()


OWNER = """
import sys, threading
from fabric_kv.memory import BufferServer, HostBuffer
buffers = {f"layer{i}": HostBuffer.allocate(5000 + i) for i in range(int(sys.argv[2]))}
for i, buffer in enumerate(buffers.values()):
    buffer.array[:] = (i + 1) % 256
server = BufferServer(sys.argv[1], buffers, label="rank 7")
print("up", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def owner(path: str, num_buffers: int = 3, *, program: str = OWNER) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", program, path, str(num_buffers)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=LONG)


@pytest.mark.parametrize("abstract", [False, True], ids=["file", "abstract"])
def test_names_sizes_epoch_and_bytes_arrive(path: str, abstract: bool, buffers: dict[str, HostBuffer]) -> None:
    address = f"@fabric_kv-test-{os.getpid()}" if abstract else path
    with BufferServer(address, buffers, label="rank 1", epoch=b"e" * 16) as server:
        if not abstract:
            assert Path(path).stat().st_mode & 0o777 == 0o600
        with import_buffers(address, timeout_s=LONG, epoch=b"e" * 16, pid=os.getpid()) as imported:
            assert list(imported) == list(buffers)
            assert (imported.epoch, imported.label, imported.pid) == (b"e" * 16, "rank 1", os.getpid())
            for i, name in enumerate(buffers):
                assert imported[name].nbytes == 5000 + i
                twin = imported[name]
                assert isinstance(twin, HostBuffer)
                twin.array[-1] = 100 + i
                assert buffers[name].array[-1] == 100 + i
            server.wait_importers(1, LONG)
            assert server.importers == [os.getpid()]
            with pytest.raises(KeyError, match="layer0"):
                imported["layer9"]
        server.wait_importers(0, LONG)
    assert not Path(path).exists()


def test_many_buffers_cost_the_importer_no_descriptors(path: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with owner(path, 300), import_buffers(path, timeout_s=LONG) as imported:
        assert len(imported) == 300
        assert len(os.listdir("/proc/self/fd")) < before + 50


def test_a_killed_owner_is_noticed_and_its_memory_stays(path: str) -> None:
    told: list[SharingError] = []
    with owner(path) as process, import_buffers(path, timeout_s=LONG, pid=process.pid) as imported:
        buffer = imported["layer1"]
        assert isinstance(buffer, HostBuffer)
        imported.on_lost(told.append)
        imported.check()
        process.kill()
        until(lambda: bool(told))
        assert told[0] is imported.lost
        assert (told[0].reason, told[0].path) == ("gone", path)
        for use in (imported.check, buffer.export):
            with pytest.raises(SharingError, match=f"rank 7 .process {process.pid}"):
                use()
        assert (buffer.array == 2).all()
        late: list[SharingError] = []
        imported.on_lost(late.append)
        assert late == told
    # The next one at the same path takes the place of what was left.
    with owner(path) as process, import_buffers(path, timeout_s=LONG, pid=process.pid):
        pass


@pytest.mark.parametrize("kept", ["buffer", "region"])
def test_an_owner_is_watched_until_the_last_buffer_and_region_are_gone(path: str, kept: str) -> None:
    with owner(path) as process, Engine("tcp", nics=["127.0.0.1"]) as engine:

        def last_one() -> HostBuffer | MemoryRegion:
            buffer = import_buffers(path, timeout_s=LONG)["layer1"]
            assert isinstance(buffer, HostBuffer)
            return buffer if kept == "buffer" else buffer.region(engine)

        left = last_one()
        gc.collect()
        process.kill()
        until(lambda: left.lost is not None)
        assert f"process {process.pid}" in str(left.lost)
        left.close()


def test_the_last_region_takes_leave_of_the_owner(path: str, buffers: dict[str, HostBuffer]) -> None:
    with BufferServer(path, buffers) as server, Engine("tcp", nics=["127.0.0.1"]) as engine:
        regions = [buffer.region(engine) for buffer in import_buffers(path, timeout_s=LONG).values()]
        gc.collect()
        server.wait_importers(1, LONG)
        regions.pop().close()
        gc.collect()
        assert server.importers == [os.getpid()]
        while regions:
            regions.pop().close()
        gc.collect()
        server.wait_importers(0, LONG)


HEIR = """
import os, subprocess
sys.stdin.readline()
for fd in os.listdir("/proc/self/fd"):
    if int(fd) > 2 and os.path.exists(f"/proc/self/fd/{fd}"):
        os.set_inheritable(int(fd), True)
heir = subprocess.Popen(["sleep", "120"], close_fds=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
print(heir.pid, flush=True)
sys.stdin.read()
"""


def test_an_owner_is_noticed_although_a_child_holds_its_connection(path: str) -> None:
    with (
        owner(path, program=OWNER.replace("sys.stdin.read()", HEIR)) as process,
        import_buffers(path, timeout_s=LONG) as imported,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
        heir = int(process.stdout.readline())
        try:
            process.kill()
            until(lambda: imported.lost is not None)
            os.kill(heir, 0)  # it is there still
        finally:
            os.kill(heir, signal.SIGKILL)


def test_an_owner_that_closes_and_one_that_withdraws_are_told_apart(path: str, buffers: dict[str, HostBuffer]) -> None:
    with BufferServer(path, buffers) as server, import_buffers(path, timeout_s=LONG) as imported:
        server.withdraw("layer0")
        until(lambda: imported["layer0"].lost is not None)
        assert isinstance(error := imported["layer0"].lost, SharingError)
        assert error.reason == "late"
        assert "'layer0' was withdrawn" in str(error)
        assert imported.lost is None
        assert imported["layer1"].lost is None
        with pytest.raises(ConfigError, match="not served"):
            server.withdraw("layer0")
        server.close()
        until(lambda: imported.lost is not None)
        assert imported.lost is not None
        assert imported.lost.reason == "late"
        assert imported["layer1"].lost is imported.lost
        with pytest.raises(ClosedError):
            server.wait_importers(0, LONG)
        with pytest.raises(ClosedError):
            server.add("more", buffers["layer0"])


def test_a_withdrawn_buffer_is_told_of_once(path: str, buffers: dict[str, HostBuffer]) -> None:
    told: list[tuple[str, SharingError, bool]] = []
    lost: list[SharingError] = []
    with BufferServer(path, buffers) as server, import_buffers(path, timeout_s=LONG) as imported:

        def tell(name: str, error: SharingError) -> None:
            told.append((name, error, imported[name].lost is error))
            raise KeyError(name)  # harms nobody

        imported.on_lost(lost.append)
        imported.on_withdrawn(tell)
        for name in ("layer1", "layer0"):
            server.withdraw(name)
            server.add(name, buffers[name])
            server.withdraw(name)  # another one, which was never imported
        until(lambda: len(told) == 2)
        late: list[str] = []
        imported.on_withdrawn(lambda name, _: late.append(name))
        assert late == [name for name, _, _ in told] == ["layer1", "layer0"]
        assert all(marked and error.reason == "late" for _, error, marked in told)
        assert not lost
        server.withdraw("layer2")
        until(lambda: late == ["layer1", "layer0", "layer2"])
        server.close()
        until(lambda: len(lost) == 1)
        assert len(told) == 2


def test_an_importer_that_dies_is_noticed(path: str, buffers: dict[str, HostBuffer]) -> None:
    gone: list[int] = []
    program = "import sys\nfrom fabric_kv.memory import import_buffers\nkept = import_buffers(sys.argv[1])\n" + (
        'print("up", flush=True)\nsys.stdin.read()'
    )
    with BufferServer(path, buffers) as server:
        server.on_importer_gone = gone.append
        with owner(path, program=program) as process:
            server.wait_importers(1, LONG)
            assert server.importers == [process.pid]
            process.send_signal(signal.SIGKILL)
            server.wait_importers(0, LONG)
        until(lambda: gone == [process.pid])
        with pytest.raises(SharingError, match="within 0 s") as error:
            server.wait_importers(1, 0)
        assert error.value.reason == "timeout"


def refusal(path: str, **options: object) -> SharingError:
    with pytest.raises(SharingError) as error:
        import_buffers(path, **{"timeout_s": LONG} | options)  # type: ignore[arg-type]
    assert error.value.path == path
    return error.value


def test_foreign_users_and_processes_are_refused(path: str, buffers: dict[str, HostBuffer]) -> None:
    us = os.geteuid()
    with BufferServer(path, buffers, users=[us + 1]):
        assert (error := refusal(path)).reason == "foreign"
        assert f"user {us} may not import" in str(error)
    with BufferServer(path, buffers):
        assert refusal(path, users=[us + 1]).reason == "foreign"
        assert refusal(path, pid=os.getpid() + 1).reason == "foreign"
        import_buffers(path, timeout_s=LONG).close()  # others are served as before


def test_another_life_a_closed_buffer_and_an_absent_server_are_refused(
    path: str, buffers: dict[str, HostBuffer]
) -> None:
    assert refusal(path, timeout_s=0.05).reason == "absent"
    with BufferServer(path, buffers) as server:
        assert refusal(path, epoch=b"x" * 16).reason == "late"
        extra = HostBuffer.allocate(10)
        server.add("extra", extra)
        extra.close()
        assert "'extra' was closed" in str(error := refusal(path))
        assert error.reason == "late"
        server.withdraw("extra")
        import_buffers(path, timeout_s=LONG).close()
    assert refusal(path, timeout_s=0.05).reason == "absent"


def test_a_server_that_comes_later_is_waited_for(path: str, buffers: dict[str, HostBuffer]) -> None:
    servers: list[BufferServer] = []
    timer = threading.Timer(0.1, lambda: servers.append(BufferServer(path, buffers)))
    timer.start()
    import_buffers(path, timeout_s=LONG).close()
    timer.join()
    servers[0].close()


@contextlib.contextmanager
def no_thread(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As with a limit on threads: those of this name cannot start."""
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        yield


def test_a_server_without_threads_refuses_an_importer_and_goes_on(
    path: str, buffers: dict[str, HostBuffer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with BufferServer(path, buffers, max_importers=1):
        with no_thread("fabric_kv-importer", monkeypatch):
            assert (error := refusal(path)).reason == "full"
        assert "no thread left" in str(error)
        assert "cannot serve an importer: can't start new thread" in caplog.text
        import_buffers(path, timeout_s=LONG).close()
    assert not Path(path).exists()
    with no_thread("fabric_kv-buffers", monkeypatch), pytest.raises(SharingError, match="can't start") as raised:
        BufferServer(path, buffers)
    assert raised.value.reason == "full"
    assert not Path(path).exists()


def test_an_importer_without_threads_keeps_nothing(
    path: str, buffers: dict[str, HostBuffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with BufferServer(path, buffers) as server:
        before = held()
        with no_thread("fabric_kv-owner", monkeypatch):
            assert (error := refusal(path)).reason == "full"
        assert "cannot be watched: can't start new thread" in str(error)
        server.wait_importers(0, LONG)
        until(lambda: held() == before)
        import_buffers(path, timeout_s=LONG).close()


def test_the_number_of_importers_is_bounded(path: str, buffers: dict[str, HostBuffer]) -> None:
    with BufferServer(path, buffers, max_importers=1) as server, import_buffers(path, timeout_s=LONG) as first:
        server.wait_importers(1, LONG)
        assert (error := refusal(path)).reason == "full"
        assert "max_importers=1" in str(error)
        first.close()
        server.wait_importers(0, LONG)
        import_buffers(path, timeout_s=LONG).close()


def test_a_silent_importer_is_dropped(path: str, buffers: dict[str, HostBuffer]) -> None:
    with BufferServer(path, buffers, timeout_s=0.05), wire.new_socket() as silent:
        silent.settimeout(LONG)
        silent.connect(path)
        assert silent.recv(100) == b""


def test_a_silent_server_is_not_waited_for_without_end(path: str) -> None:
    with wire.new_socket() as silent:
        silent.bind(path)
        silent.listen(1)
        assert refusal(path, timeout_s=0.2).reason == "timeout"


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"FKVB\x01\x00\xff", b"FKVB\x09\x00", b"x" * 100_000])
def test_garbage_harms_nobody(path: str, garbage: bytes, buffers: dict[str, HostBuffer]) -> None:
    with BufferServer(path, buffers), wire.new_socket() as liar:
        liar.settimeout(LONG)
        liar.connect(path)
        liar.sendmsg([garbage])
        answer, _ = wire.receive(liar, wire.FromServer, path)
        assert answer is not None
        assert isinstance(answer.body, wire.Refused)
        assert answer.body.reason == "protocol"
        import_buffers(path, timeout_s=LONG).close()


def test_descriptors_where_none_belong_are_closed(path: str, buffers: dict[str, HostBuffer]) -> None:
    with BufferServer(path, buffers), wire.new_socket() as liar:
        liar.settimeout(LONG)
        liar.connect(path)
        ours, theirs = os.pipe()
        wire.send(liar, wire.Hello(None), [theirs] * 10)
        answer, _ = wire.receive(liar, wire.FromServer, path)
        assert answer is not None
        assert isinstance(answer.body, wire.Refused)
        assert answer.body.reason == "protocol"
        os.close(theirs)
        assert os.read(ours, 1) == b"", "the server keeps the other end"
        os.close(ours)


@contextlib.contextmanager
def lying_server(path: str, *answers: Callable[[socket.socket], None]) -> Iterator[None]:
    """Says what it likes, one answer a frame."""
    listener = wire.new_socket()
    listener.bind(path)
    listener.listen(1)

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(LONG)
            for answer in answers:
                connection.recv(1 << 17)
                answer(connection)
            with contextlib.suppress(OSError):
                connection.recv(1 << 17)

    thread = threading.Thread(target=serve)
    thread.start()
    yield
    thread.join(LONG)
    listener.close()


def test_a_server_that_lies_about_sizes_is_refused_and_nothing_is_mapped(path: str) -> None:
    welcome = wire.Welcome(b"e" * 16, "liar", 1)
    with HostBuffer.allocate(4096) as small, small.export() as exported:
        big = wire.Handles("kv", BufferInfo("host", 8000, (8192,), 4096))
        fds = exported.fds
        with lying_server(path, lambda c: wire.send(c, welcome), lambda c: wire.send(c, big, fds)):
            assert (error := refusal(path)).reason == "size"
        assert "announced with 8192 bytes and has 4096" in str(error)
        os.unlink(path)
        for handles in ([], fds * 2):
            with lying_server(
                path, lambda c: wire.send(c, welcome), lambda c, handles=handles: wire.send(c, big, handles)
            ):
                assert refusal(path).reason in ("protocol", "gone")
            os.unlink(path)
        with lying_server(path, lambda c: wire.send(c, wire.Done(), fds)):
            assert refusal(path).reason == "protocol"


def test_a_live_server_is_not_replaced_and_a_file_is_not_removed(path: str, buffers: dict[str, HostBuffer]) -> None:
    with BufferServer(path, buffers):
        with pytest.raises(SharingError, match="another process serves there") as error:
            BufferServer(path)
        assert error.value.reason == "full"
        import_buffers(path, timeout_s=LONG).close()
    Path(path).write_text("precious")
    with pytest.raises(SharingError):
        BufferServer(path)
    assert Path(path).read_text() == "precious"
    with pytest.raises(SharingError) as error:
        BufferServer(path + "/not/there")
    assert error.value.reason == "absent"


def test_close_says_what_is_in_use_and_can_be_called_again(path: str, buffers: dict[str, HostBuffer]) -> None:
    with BufferServer(path, buffers):
        imported = import_buffers(path, timeout_s=LONG)
        buffer = imported["layer0"]
        assert isinstance(buffer, HostBuffer)
        array = buffer.array
        with pytest.raises(ConfigError, match=r"1 of 3 buffers .* in use"):
            imported.close()
        del array
        imported.close()
        imported.close()


def test_buffers_that_are_dropped_take_leave_by_themselves(path: str, buffers: dict[str, HostBuffer]) -> None:
    with BufferServer(path, buffers) as server:
        imported = import_buffers(path, timeout_s=LONG)
        server.wait_importers(1, LONG)
        del imported
        gc.collect()
        server.wait_importers(0, LONG)


def test_names_and_paths_that_no_frame_and_no_socket_can_have(path: str, buffers: dict[str, HostBuffer]) -> None:
    with BufferServer(path, buffers) as server:
        for name in ("\ud800", 5, None, b"layer"):
            with pytest.raises(ConfigError, match="name="):
                server.add(name, buffers["layer0"])  # type: ignore[arg-type]
        import_buffers(path, timeout_s=LONG).close()
    with pytest.raises(ConfigError, match="label="):
        BufferServer(path, label="\ud800")
    for wrong in ("", "@", "a\0b", b""):
        for use in (BufferServer, import_buffers):
            with pytest.raises(ConfigError, match="path="):
                use(wrong)  # type: ignore[operator]
    odd = os.fsencode(path) + b"\xff"  # a file may be called so, and no text
    with BufferServer(os.fsdecode(odd), buffers) as server:
        import_buffers(os.fsdecode(odd), timeout_s=LONG).close()
        server.add("closed", HostBuffer.allocate(1))
        server._buffers["closed"].close()
        with pytest.raises(SharingError, match="'closed' was closed"):
            import_buffers(os.fsdecode(odd), timeout_s=LONG)


def test_an_importer_that_cannot_watch_the_owners_process_refuses(
    path: str, buffers: dict[str, HostBuffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(code: int) -> None:
        raise OSError(code, os.strerror(code))

    with BufferServer(path, buffers):
        before = held()
        monkeypatch.setattr(os, "pidfd_open", lambda _: fail(errno.EMFILE))
        assert (error := refusal(path)).reason == "full"
        assert "open files" in str(error)
        until(lambda: held() == before)
        for code in (errno.ENOSYS, errno.ESRCH, errno.EPERM):  # the connection says it, too
            monkeypatch.setattr(os, "pidfd_open", lambda _, code=code: fail(code))
            import_buffers(path, timeout_s=LONG).close()


def test_whoever_is_told_of_a_lost_owner_finds_its_buffers_marked(
    path: str, buffers: dict[str, HostBuffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with BufferServer(path, buffers) as server, import_buffers(path, timeout_s=LONG) as imported:
        marked = threading.Event()
        told: list[list[bool]] = []
        at_it = threading.Event()
        mark = HostBuffer._mark_lost

        def slowly(buffer: HostBuffer, error: Exception) -> None:
            at_it.set()
            assert marked.wait(LONG)
            mark(buffer, error)

        monkeypatch.setattr(HostBuffer, "_mark_lost", slowly)
        server.close()
        assert at_it.wait(LONG)
        imported.on_lost(lambda _: told.append([buffer.lost is not None for buffer in imported.values()]))
        assert imported.lost is None
        assert not told
        marked.set()
        until(lambda: bool(told))
        assert told == [[True] * 3]


def test_a_lost_region_gives_out_no_keys(path: str, buffers: dict[str, HostBuffer]) -> None:
    with (
        BufferServer(path, buffers) as server,
        import_buffers(path, timeout_s=LONG) as imported,
        Engine("tcp", nics=["127.0.0.1"]) as engine,
        imported["layer0"].region(engine) as region,
    ):
        peer = engine.add_peer(engine.address)
        region.remote_for(peer)
        server.withdraw("layer0")
        until(lambda: region.lost is not None)
        with pytest.raises(SharingError, match="'layer0' was withdrawn"):
            region.remote_for(peer)


def test_imported_buffers_are_not_served_on(path: str, buffers: dict[str, HostBuffer]) -> None:
    with BufferServer(path, buffers) as server, import_buffers(path, timeout_s=LONG) as imported:
        with pytest.raises(ConfigError, match="only its owner"):
            server.add("again", imported["layer0"])
        for name in ("", "x" * 256, "layer0"):
            with pytest.raises(ConfigError):
                server.add(name, buffers["layer0"])
