#!/usr/bin/env python3
"""Asks DXC, Microsoft's HLSL compiler, whether Windows would take the kernels.

usage: dxc.py LIBDXCOMPILER FILE...    HLSL; the first line of each file is `// PROFILE ENTRY_POINT`

DXC hangs now and then for no reason that lies in the kernel. So compilers run in processes of their own, one per core;
one that gives no answer in time is ended, and its kernel tried once more. Exit status 1 if a kernel was refused.
"""

import ctypes
import json
import os
import pathlib
import queue
import select
import subprocess
import sys
import threading
import time
import uuid

TIMEOUT = 60  # seconds for one kernel
# What wgpu's DX12 backend says, too.
ARGUMENTS = ["-HV", "2018", "-no-warnings", "-Ges"]

CLSID_COMPILER = "73e22d93-e6ce-47f3-b5bf-f0664f39c1b0"
IID_COMPILER3 = "228b4687-5a6a-4730-900c-9702b2203f54"
IID_RESULT = "58346cda-dde7-4497-9461-6f87af5e0659"
UTF8 = 65001

pointer = ctypes.c_void_p


class Source(ctypes.Structure):
    """DxcBuffer."""

    _fields_ = [("text", ctypes.c_char_p), ("bytes", ctypes.c_size_t), ("encoding", ctypes.c_uint32)]


class Interface:
    """A COM object, released at the end of a `with`.

    Its table begins with QueryInterface, AddRef and Release; outside Windows two slots for destructors follow.
    """

    OWN = 5

    def __init__(self):
        self.this = pointer()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.this:
            self.call(2, ctypes.c_uint32)

    def call(self, slot, returns, *arguments):
        table = ctypes.cast(self.this, ctypes.POINTER(ctypes.POINTER(pointer))).contents
        types = [ctypes.c_int32 if isinstance(a, int) else pointer for a in arguments]
        return ctypes.CFUNCTYPE(returns, pointer, *types)(table[slot])(self.this, *arguments)

    def check(self, slot, *arguments):
        status = self.call(slot, ctypes.c_int32, *arguments)
        if status < 0:
            raise OSError(f"DXC's method {slot} failed: {status & 0xFFFFFFFF:#x}")


def guid(text):
    return ctypes.create_string_buffer(uuid.UUID(text).bytes_le, 16)


def compile_text(compiler, text):
    """What is wrong with it; nothing if DXC takes it."""
    slash, profile, entry_point = text.split(b"\n", 1)[0].decode().split()
    assert slash == "//"
    arguments = ["-T", profile, "-E", entry_point, *ARGUMENTS]
    wide = (ctypes.c_wchar_p * len(arguments))(*arguments)
    source = Source(text, len(text), UTF8)
    with Interface() as result, Interface() as messages:
        compiler.check(
            Interface.OWN,
            ctypes.byref(source),
            wide,
            len(arguments),
            None,
            guid(IID_RESULT),
            ctypes.byref(result.this),
        )
        status = ctypes.c_int32()
        result.check(Interface.OWN, ctypes.byref(status))
        if status.value >= 0:
            return ""
        result.check(Interface.OWN + 2, ctypes.byref(messages.this))
        if not messages.this:
            return f"refused without a word: {status.value & 0xFFFFFFFF:#x}"
        return ctypes.string_at(
            messages.call(Interface.OWN, pointer), messages.call(Interface.OWN + 1, ctypes.c_size_t)
        ).decode(errors="replace")


def work(library):
    """Answers each path on standard input with a line of JSON."""
    dxc = ctypes.CDLL(library)
    with Interface() as compiler:
        status = dxc.DxcCreateInstance(guid(CLSID_COMPILER), guid(IID_COMPILER3), ctypes.byref(compiler.this))
        if status != 0:
            sys.exit(f"no compiler: {status & 0xFFFFFFFF:#x}")
        for line in sys.stdin:
            print(json.dumps(compile_text(compiler, pathlib.Path(line.rstrip("\n")).read_bytes())), flush=True)
    # The library's own end is one of the places where it may hang.
    os._exit(0)


class Worker:
    """A compiler in a process of its own."""

    def __init__(self, library):
        self.library = library
        self.process = None

    def stop(self):
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    def try_once(self, path):
        """What is wrong with the kernel; None if the compiler hung or fell over."""
        if not self.process:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--worker", self.library], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        try:
            self.process.stdin.write(f"{path}\n".encode())
            self.process.stdin.flush()
            if select.select([self.process.stdout], [], [], TIMEOUT)[0]:
                answer = self.process.stdout.readline()
                if answer:
                    return json.loads(answer)
        except BrokenPipeError:
            pass
        self.stop()
        return None


def compile_all(library, paths):
    """What is wrong with each, and the seconds it took; and those that needed a second try."""
    waiting = queue.SimpleQueue()
    for path in paths:
        waiting.put(path)
    results, repeated = {}, []

    def serve():
        worker = Worker(library)
        while True:
            try:
                path = waiting.get_nowait()
            except queue.Empty:
                break
            start = time.monotonic()
            wrong = worker.try_once(path)
            if wrong is None:
                repeated.append(path)
                start = time.monotonic()
                wrong = worker.try_once(path)
            if wrong is None:
                wrong = f"no answer within {TIMEOUT} s, or a crash, twice"
            results[path] = (wrong, time.monotonic() - start)
        worker.stop()

    threads = [threading.Thread(target=serve) for _ in os.sched_getaffinity(0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, repeated


def main(library, *files):
    results, repeated = compile_all(library, files)
    refused = 0
    for path in files:
        wrong = results[path][0].strip()
        if wrong:
            refused += 1
            print(f"{path}: {wrong}")
    for path in repeated:
        print(f"{path}: tried twice")
    slowest = max(files, key=lambda path: results[path][1])
    print(f"slowest: {results[slowest][1]:.2f} s, {os.path.basename(slowest)}")
    print(f"DXC: {len(files) - refused} kernels accepted, {refused} refused")
    return 1 if refused else 0


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        work(sys.argv[2])
    else:
        sys.exit(main(*sys.argv[1:]))
