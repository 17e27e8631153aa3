"""Adds two steps to the build that pyproject.toml describes: generating the contracts' modules, and
compiling the CPU kernels."""

import runpy

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

kernels = runpy.run_path("kernels/cpu/build.py")


class Build(build_py):
    """Makes protos/*_pb2*.py and kernels/cpu/built/*.so before the packages are collected."""

    def run(self) -> None:
        runpy.run_path("protos/generate.py")["generate"]()
        print(*kernels["build"](), sep="\n")
        super().run()


class Wheel(bdist_wheel):
    """For this platform alone, whose machine code is in it, and for any Python: none is linked."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


# Where the machine has no C++ compiler, a wheel brings one for the time of the build.
setup(
    cmdclass={"build_py": Build, "bdist_wheel": Wheel},
    setup_requires=["ziglang>=0.14"] if kernels["needs_wheel"]() else [],
)
