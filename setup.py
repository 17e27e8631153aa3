"""Adds two steps to the build that pyproject.toml describes: generating the contracts' modules, and
compiling the CPU kernels."""

import runpy

from setuptools import setup
from setuptools.command.build_py import build_py

kernels = runpy.run_path("kernels/cpu/build.py")


class Build(build_py):
    """Makes protos/*_pb2*.py and kernels/cpu/built/*.so before the packages are collected."""

    def run(self) -> None:
        runpy.run_path("protos/generate.py")["generate"]()
        print(*kernels["build"](), sep="\n")
        super().run()


# Where the machine has no C++ compiler, a wheel brings one for the time of the build.
setup(
    cmdclass={"build_py": Build},
    setup_requires=["ziglang>=0.14"] if kernels["needs_wheel"]() else [],
)
