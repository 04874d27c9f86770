# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""What every script does at its edges: one-line errors, exit codes, logging, and path arguments."""

import argparse
import glob
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path


class UsageError(Exception):
    """A user's mistake. The text says in one line what is wrong, where, and what to do; the script exits with 2."""


class CheckFailed(Exception):
    """A verification did not hold, or a model's answer cannot be used; the script exits with 1."""


def run(main: Callable[[], int]) -> None:
    """Run a script's `main`, turning the kit's errors into one line on stderr and an exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary folders are removed
    name = Path(sys.argv[0]).name
    try:
        code = main()
    except (UsageError, CheckFailed) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        code = 2 if isinstance(error, UsageError) else 1
    except BrokenPipeError:  # the reader of our output has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:  # a path of the wrong kind, no permission, a full disk
        print(f"{name}: error: {error.filename or 'file system'}: {error.strerror or error}", file=sys.stderr)
        code = 2 if isinstance(error, (FileExistsError, NotADirectoryError, PermissionError)) else 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        code = 130
    raise SystemExit(code)


def add_model_path(parser: argparse.ArgumentParser, required: bool) -> None:
    """`--model_path`: what `backends.open_model` takes; the paths that a wildcard matches, for `one_path`."""
    text = "an .om, an .onnx, a split model (its folder or .json), or a checkpoint folder"
    parser.add_argument("--model_path", nargs="+", required=required, help=text)


def add_dtype(parser: argparse.ArgumentParser, whose: str) -> None:
    """`--dtype`: what a model computes in that leaves the choice open."""
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16", "float16"),
        help=f"computing type of {whose}, or of openvino",
    )  # fmt: skip


def make_parser(doc: str) -> argparse.ArgumentParser:
    """An argument parser whose help is the script's docstring and shows the defaults."""

    class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
        def _get_help_string(self, action):
            # "default: None" and "default: False" contradict the texts that say what happens without the flag.
            return action.help if action.default in (None, False, []) else super()._get_help_string(action)

    return argparse.ArgumentParser(description=doc, formatter_class=Formatter, allow_abbrev=False)


def one_path(values: list[str], flag: str) -> Path:
    """The one existing path that `values` name.

    Args:
        values: what followed the flag (`nargs="+"`): a path, a wildcard that the shell left as it was, or the several
            files that it became. The guide's own commands end in `*.om`, which matches what lies there.
        flag: the flag's name, for the message.

    Raises:
        UsageError: nothing or more than one path matches; the candidates are listed.
    """
    matches = []
    for value in values:
        if value and Path(value).exists():
            matches.append(value)
        else:
            matches.extend(sorted(glob.glob(value)))
    if len(matches) == 1:
        return Path(matches[0])
    if not matches:
        raise UsageError(f"{flag}: nothing matches {' '.join(values)}; give the path of one existing file or folder")
    raise UsageError(f"{flag}: {len(matches)} paths match, give exactly one of: {', '.join(matches)}")


def positive_int(text: str) -> int:
    """argparse type: a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return value


def unit_interval(text: str) -> float:
    """argparse type: a number from 0 to 1."""
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} does not lie between 0 and 1")
    return value
