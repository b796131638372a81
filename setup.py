"""Builds the kernels' C library with the package; everything else stands in pyproject.toml.

The library has no Python ABI, so a wheel fits every Python 3 on its platform. Without a C compiler
the package installs all the same and the codecs run in plain Python.
"""

import re
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent))  # an isolated build does not look here

from gpu_kernels.build import BuildError, build_library, is_current
from gpu_kernels.native import library_path


class BuildKernels(build_py):
    """Also for editable installs: the library then lies beside its sources."""

    def run(self) -> None:
        try:
            if not is_current():
                build_library()
        except BuildError as error:
            print(f"torpor: {error}", file=sys.stderr)
        super().run()
        if not self.editable_mode:  # a wheel has no checkout beside it
            self.copy_file("prefect.yaml", str(Path(self.build_lib) / "deployments"))


class PlatformWheel(bdist_wheel):
    """Any Python 3, but one platform: the wheel holds a shared object."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", _manylinux(super().get_tag()[2])


class WithLibrary(Distribution):
    """Its files go where a wheel keeps what belongs to one platform."""

    def has_ext_modules(self) -> bool:
        return True


def _manylinux(platform: str) -> str:
    """The oldest glibc that has every symbol of the library; the tests ask auditwheel too."""
    library = library_path()
    if not platform.startswith("linux_") or not library.exists():
        return platform
    symbols = re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes())
    minor = max(17, *map(int, symbols))  # 2.17 is the oldest that pip still names
    return f"manylinux_2_{minor}_{platform.removeprefix('linux_')}"


setup(distclass=WithLibrary, cmdclass={"build_py": BuildKernels, "bdist_wheel": PlatformWheel})
