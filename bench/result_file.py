"""Where a bench's result goes: looked at before the run, which may take long."""

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
