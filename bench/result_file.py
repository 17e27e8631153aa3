"""What a bench reads and where its result goes: looked at before the run, which may take long."""

import argparse
from pathlib import Path


def result_file(text: str) -> Path:
    """An argument's type: a file, there or not, in a folder that is there."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder, not a file")
    return path


def checkpoint_folder(text: str) -> Path:
    """An argument's type: a folder with a config.json."""
    path = Path(text)
    if not (path / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{path} has no config.json")
    return path
