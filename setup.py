"""Adds one step to the build that pyproject.toml describes: generating the contracts' modules."""

import runpy

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithContracts(build_py):
    """Generates protos/*_pb2*.py before the packages are collected."""

    def run(self) -> None:
        runpy.run_path("protos/generate.py")["generate"]()
        super().run()


setup(cmdclass={"build_py": BuildWithContracts})
