# Toolchain of the release wheels, see native/wheels.py. `zig c++` is clang with the headers and symbol versions of every
# glibc, and links its libc++ statically: one compiler for both architectures, on any host, for a glibc older than the host's.
#
# Reads from the environment, which CMake's own probes see too: PERSIA_ZIG (the program), PERSIA_ARCHITECTURE and PERSIA_GLIBC.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR $ENV{PERSIA_ARCHITECTURE})
# With a target, zig compiles for the architecture's baseline and not for the host's processor.
set(target -target $ENV{PERSIA_ARCHITECTURE}-linux-gnu.$ENV{PERSIA_GLIBC})
set(CMAKE_CXX_COMPILER $ENV{PERSIA_ZIG} c++ ${target})
set(CMAKE_C_COMPILER $ENV{PERSIA_ZIG} cc ${target}) # of GoogleTest alone
set(CMAKE_AR $ENV{PERSIA_ZIG})
set(CMAKE_CXX_ARCHIVE_CREATE "<CMAKE_AR> ar qcs <TARGET> <LINK_FLAGS> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_APPEND "<CMAKE_AR> ar qs <TARGET> <LINK_FLAGS> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_FINISH "")
# Hides zstd, OpenSSL and libc++, which are linked statically. It also makes Debian's libzstd.a fit for a module, though it is
# compiled for executables: its symbols can no longer be replaced by those of another library.
set(CMAKE_MODULE_LINKER_FLAGS_INIT -Wl,--version-script=${CMAKE_CURRENT_LIST_DIR}/exports.map)
