"""What is inside a wheel: its tag, its size, what its library links to, the oldest system it runs on.

    python tools/check_wheel.py dist/*.whl

Fails where a library needs anything but the C, C++ and OpenMP runtimes, or a C library younger than the wheel's own
manylinux tag promises. A wheel that was built outside a manylinux image says which tag it could bear. Reads ELF with
readelf, of binutils.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

RUNTIMES = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libgomp.so.1", "libpthread.so.0"}
LOADER = re.compile(r"ld-linux[\w.-]*\.so\.\d")
MANYLINUX = re.compile(r"manylinux_(\d+)_(\d+)_")


def readelf(option: str, library: Path) -> str:
    return subprocess.run(["readelf", "-W", option, library], capture_output=True, text=True, check=True).stdout


def needed(library: Path) -> set[str]:
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", readelf("-d", library)))


def youngest(library: Path, family: str) -> tuple[int, ...]:
    found = re.findall(rf"\b{family}_(\d+(?:\.\d+)+)\b", readelf("-V", library))
    return max((tuple(map(int, version.split("."))) for version in found), default=())


def check(wheel: Path) -> list[str]:
    """What is wrong with it; prints what it is."""
    wrong = []
    with zipfile.ZipFile(wheel) as files, tempfile.TemporaryDirectory() as folder:
        names = files.namelist()
        libraries = [name for name in names if name.endswith((".so", ".dylib"))]
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, {len(names)} files, {len(libraries)} libraries")
        if ("py3-none-any" in wheel.name) == bool(libraries):
            wrong.append(f"{wheel.name}: the tag and {len(libraries)} libraries do not go together")
        sources = [name for name in names if name.endswith((".cpp", ".h")) or name.startswith(("tests/", "docs/"))]
        if sources:
            wrong.append(f"{wheel.name} holds sources: {', '.join(sources[:5])}")
        own = wheel.name.split("-")[0]
        others = sorted({top for name in names if not (top := name.split("/")[0]).startswith(f"{own}-")} - {own})
        if others:
            wrong.append(f"{wheel.name} holds more than {own}: {', '.join(others)}")
        for name in libraries:
            library = Path(files.extract(name, folder))
            links = {one for one in needed(library) if not LOADER.fullmatch(one)}
            glibc, cxx = youngest(library, "GLIBC"), youngest(library, "GLIBCXX")
            written = {f: ".".join(map(str, v)) for f, v in (("GLIBC", glibc), ("GLIBCXX", cxx))}
            print(f"  {name}: {library.stat().st_size / 1e6:.2f} MB, links {', '.join(sorted(links))}; needs {written}")
            if links - RUNTIMES:
                wrong.append(f"{name} links to {', '.join(sorted(links - RUNTIMES))}")
            promised = max((tuple(map(int, tag)) for tag in MANYLINUX.findall(wheel.name)), default=None)
            if promised is None:
                print(f"  not for a registry as it is; glibc allows the tag manylinux_{glibc[0]}_{glibc[1]}")
            elif glibc[:2] > promised:
                wrong.append(f"{name} needs glibc {written['GLIBC']}, more than the tag of {wheel.name} promises")
    return wrong


def main() -> None:
    wrong = [line for path in sys.argv[1:] for line in check(Path(path))]
    print("\n".join(wrong), file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
