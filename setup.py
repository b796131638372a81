"""Builds the kernels' C library with the package; everything else stands in pyproject.toml.

The library has no Python ABI, so a wheel fits every Python 3 on its platform. Without a C compiler
the package installs all the same and the codecs run in plain Python.
"""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent))  # an isolated build does not look here

from gpu_kernels.build import BuildError, build_cuda, build_library, is_current


class BuildKernels(build_py):
    """Also for editable installs: the library then lies beside its sources."""

    def run(self) -> None:
        try:
            if not is_current():
                build_library()
                build_cuda()
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
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildKernels, "bdist_wheel": PlatformWheel})
