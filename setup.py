"""Builds the native module with CMake; everything else is said in pyproject.toml.

What CMake needs and pip cannot bring (a C++20 compiler, headers of Python, Asio, zstd, xxHash, OpenSSL and
nghttp2) is looked for first, so that a machine without it gets the list of packages to install at once,
instead of a page of compiler output.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class Requirement:
    """Something that the distribution has to bring."""

    what: str
    debian: str
    fedora: str
    is_there: Callable[[], bool]


def compiler() -> list[str]:
    """The C++ compiler that CMake will use: $CXX, or the first of those that it looks for."""
    found = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), "c++")
    return found.split()


def compiles(source: str, *flags: str) -> bool:
    """Whether the compiler accepts the source; false also when there is no compiler."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "probe.cc").write_text(source)
        command = [*compiler(), "-std=c++20", *flags, "probe.cc", "-o", "probe"]
        try:
            return subprocess.run(command, capture_output=True, cwd=directory, check=False).returncode == 0
        except OSError:
            return False


def has_cxx20() -> bool:
    """Uses the library too: some compilers know the flag and bring an older library."""
    return compiles("#include <bit>\n#include <span>\nint main() { return int(std::span<int>().size()); }\n")


def has_python_headers() -> bool:
    return Path(sysconfig.get_path("include"), "Python.h").exists()


def has_asio() -> bool:
    """Only preprocesses: compiling Asio takes seconds."""
    return compiles("#include <asio.hpp>\n", "-E", "-DASIO_STANDALONE")


def has_zstd() -> bool:
    return compiles("#include <zstd.h>\n", "-E")


def has_xxhash() -> bool:
    return compiles("#include <xxhash.h>\n", "-E")


def has_openssl() -> bool:
    return compiles("#include <openssl/ssl.h>\n", "-E")


def has_nghttp2() -> bool:
    return compiles("#include <nghttp2/nghttp2.h>\n", "-E")


COMPILER = Requirement("a C++20 compiler (g++ 11, clang 14, or later)", "g++", "gcc-c++", has_cxx20)
HEADERS = (
    Requirement(f"the headers of {PYTHON} (Python.h)", f"{PYTHON}-dev", "python3-devel", has_python_headers),
    Requirement("the headers of Asio (asio.hpp)", "libasio-dev", "asio-devel", has_asio),
    Requirement("zstd with its headers (zstd.h)", "libzstd-dev", "libzstd-devel", has_zstd),
    Requirement("xxHash's header (xxhash.h)", "libxxhash-dev", "xxhash-devel", has_xxhash),
    Requirement("OpenSSL 3 with its headers (openssl/ssl.h)", "libssl-dev", "openssl-devel", has_openssl),
    Requirement(
        "nghttp2 with its headers (nghttp2/nghttp2.h)", "libnghttp2-dev", "libnghttp2-devel", has_nghttp2
    ),
)


def missing_requirements() -> list[Requirement]:
    """What is missing. Without a compiler nothing can be looked for, and all is named, which does no harm."""
    if not COMPILER.is_there():
        return [COMPILER, *HEADERS]
    return [header for header in HEADERS if not header.is_there()]


def check_requirements() -> None:
    """Ends the build with the packages to install when something is missing."""
    missing = missing_requirements()
    if not missing:
        return
    lines = ["persia's native module cannot be built here. It needs"]
    lines += [f"  * {requirement.what}" for requirement in missing]
    lines += ["Install these packages, then run the same command again:"]
    lines += [f"  Debian, Ubuntu:  apt-get install {' '.join(r.debian for r in missing)}"]
    lines += [f"  Fedora, RHEL:    dnf install {' '.join(r.fedora for r in missing)}"]
    sys.exit("\n".join(lines))


class CleanBuildPy(build_py):
    """Starts from an empty folder, where a module deleted from the sources would otherwise live on."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildNative(build_ext):
    """Runs CMake and Ninja, which rebuild only what changed when their folder is still there."""

    def run(self) -> None:
        check_requirements()
        super().run()

    def build_extension(self, ext: Extension) -> None:
        prefix = Path(self.get_ext_fullpath(ext.name)).resolve().parents[1]
        # Not self.build_temp, which is another one each time for an editable installation.
        folder = os.environ.get("PERSIA_BUILD_FOLDER") or f"build/cmake-{sys.implementation.cache_tag}"
        build = ROOT / folder
        # As for other projects, what a builder adds; first, so that it changes none of the options below.
        added = shlex.split(os.environ.get("CMAKE_ARGS", ""))
        options = [*added, *configure_options()]
        subprocess.run([cmake(), "-S", ROOT / "native", "-B", build, *options], check=True)
        subprocess.run([cmake(), "--build", build, "--target", "_core"], check=True)
        subprocess.run([cmake(), "--install", build, "--prefix", prefix], check=True)


def cmake() -> str:
    """The one of the build environment, which pip puts first on PATH."""
    return shutil.which("cmake") or "cmake"


def configure_options() -> list[str]:
    """Paths that pip may have put elsewhere than last time are given anew: the CMake cache stays usable."""
    import pybind11

    return [
        "-G=Ninja",
        f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja') or 'ninja'}",
        "-DCMAKE_BUILD_TYPE=Release",
        "-DCMAKE_UNITY_BUILD=ON",  # eight sources at a time: parsing the same headers was most of the time
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        "-DPERSIA_BUILD_PYTHON=ON",
        "-DPERSIA_WERROR=OFF",  # a compiler newer than ours may warn about more
    ]


if __name__ == "__main__":
    setup(
        ext_modules=[Extension("persia._core", sources=[])],
        options={"build": {"build_base": "build/setuptools"}},
        cmdclass={"build_ext": BuildNative, "build_py": CleanBuildPy},
    )
