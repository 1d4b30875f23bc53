"""Builds the extension modules, ``kvstore._cext`` and ``kvstore._index``, from the Cython sources in ``cext/``.

No flag here depends on the building machine's CPU: instruction sets beyond the baseline are chosen at run time. There
is no debug information, which would take a good part of the time; where CFLAGS are given, they decide.

The eviction policies are the files in ``cext/policies`` that have a class of ``Policy``; a policy is named as its file.
They are listed for Cython in ``cext/policies/all.pxi``, and for the settings in ``kvstore/_policies.py``, because the
supervisor does not load the extension.
"""

import os
import re
import shutil
import sys
import sysconfig
from glob import glob
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup


def list_policies() -> None:
    """Write the two lists."""
    folder = Path("cext/policies")
    texts = {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.pxi"))}
    classes = {name: re.findall(r"^cdef class (\w+)\(Policy\):", text, re.MULTILINE) for name, text in texts.items()}
    policies = {name: found[0] for name, found in classes.items() if found}
    includes = "".join(f'include "{name}.pxi"\n' for name in policies)
    table = ", ".join(f'"{name}": {policy}' for name, policy in policies.items())
    _write(folder / "all.pxi", f"# Written by setup.py.\n\n{includes}\ncdef dict _POLICIES = {{{table}}}\n")
    doc = '"""The names of the eviction policies. Written by setup.py."""'
    _write(Path("kvstore/_policies.py"), f"{doc}\n\nPOLICIES: tuple[str, ...] = {tuple(policies)}\n")


def _write(file: Path, text: str) -> None:
    """Write a file unless it is like that: a newer one would have everything built again."""
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        file.write_text(text, encoding="utf-8")


def check_compiler() -> None:
    """End with one line, rather than with the output of a build that fails, where the extension cannot be compiled."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None and shutil.which("cc") is None:
        sys.exit(f"kvstore needs a C compiler: there is no {compiler}; on Debian: apt-get install gcc python3-dev")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if not headers.exists():
        sys.exit(f"kvstore needs Python's headers: there is no {headers}; on Debian: apt-get install python3-dev")


# An index waits for memory: it is as fast with -O1 as with -O3, and compiled sooner. Hashing is slower with -O1.
MODULES = {"_cext": "-O2", "_index": "-O1"}


def modules() -> list[Extension]:
    """The two modules, which have no code in common but ``buffers.pxi``, and are compiled at the same time."""
    own = "CFLAGS" not in os.environ
    extensions = [
        Extension(
            f"kvstore.{name}",
            [f"cext/{name}.pyx"],
            include_dirs=["cext"],
            depends=["cext/xxh3.h", *glob("cext/**/*.pxi", recursive=True)],
            extra_compile_args=["-fno-strict-aliasing", *([level, "-g0"] if own else [])],
            extra_link_args=["-lm"],
        )
        for name, level in MODULES.items()
    ]
    faster = {"boundscheck": False, "wraparound": False, "cdivision": True}
    smaller = {"auto_pickle": False, "binding": False, "emit_code_comments": False}
    return cythonize(extensions, nthreads=len(extensions), language_level=3, compiler_directives={**faster, **smaller})


list_policies()
if {"egg_info", "dist_info", "sdist"}.isdisjoint(sys.argv):  # these compile nothing
    check_compiler()
setup(ext_modules=modules(), options={"build_ext": {"parallel": True}})
