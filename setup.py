"""Builds the one extension module, ``kvstore._cext``, from the Cython sources in ``cext/``.

No flag here depends on the building machine's CPU: instruction sets beyond the baseline are chosen at run time.
"""

from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup

setup(
    ext_modules=cythonize(
        [
            Extension(
                "kvstore._cext",
                ["cext/_cext.pyx"],
                include_dirs=["cext"],
                depends=["cext/xxh3.h", *glob("cext/**/*.pxi", recursive=True)],
                extra_compile_args=["-O3", "-fno-strict-aliasing"],
                extra_link_args=["-lm"],
            )
        ],
        language_level=3,
        compiler_directives={"boundscheck": False, "wraparound": False, "cdivision": True},
    )
)
