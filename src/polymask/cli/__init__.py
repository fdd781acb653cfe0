"""The command line: one file a group of verbs, one dataclass a verb.

Results go to standard output, as tables or with --json as one JSON object; progress and messages go
to standard error. Exit codes: 0 done, 1 a problem that one line explains, 2 a command that makes no
sense, 130 stopped on request with everything saved.
"""

import io
import os
import sys
import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING

from polymask.errors import InterruptedTraining, PolymaskError

if TYPE_CHECKING:
    from polymask.cli.verb import Verb

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # a file's name may be any bytes, and is written as it is
    warnings.formatwarning = lambda message, *_, **__: f"polymask: {message}\n"  # a line, not one of our files
    try:
        code = _run(words)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("polymask: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        return 0
    return code


def _run(words: list[str]) -> int:
    if "--version" in words[:1]:
        from polymask.cli.version import print_version

        return print_version(words)
    if missing := [name for name in ("tyro", "rich") if find_spec(name) is None]:
        return _explain(f"the command line needs {' and '.join(missing)}; pip install 'polymask[cli]'", 1)
    from polymask.cli.parser import parse
    from polymask.cli.usage import Misused

    try:
        verb = parse(words)
    except Misused as problem:
        return _explain(str(problem), 2)
    try:
        if _several() and not verb.in_ranks:
            raise PolymaskError(
                "torchrun is for learn; start this command without it (benchmark has --workers and --engine ray)"
            )
        return verb.execute()
    except InterruptedTraining as stopped:
        return _explain(str(stopped).replace("the same again with resume", "the same command"), 130)
    except (PolymaskError, ImportError) as error:
        if verb.debug:
            raise
        return _explain(_message(error, verb), 1)


def _message(error: PolymaskError | ImportError, verb: "Verb") -> str:
    """An error for those who type commands: flags, not arguments, and what to install where something is missing."""
    from polymask.cli.usage import in_flags
    from polymask.cli.verb import remedy

    text = in_flags(str(error).replace("start over without it", "start over with --fresh"), type(verb))
    if isinstance(error, ImportError) and "pip install" not in text:
        text += f"; {remedy(error.name or '')}"
    return text


def _explain(message: str, code: int) -> int:
    me = f"polymask (rank {os.environ['RANK']})" if _several() else "polymask"
    print(f"{me}: {message}", file=sys.stderr)
    return code


def _several() -> bool:
    """Whether torchrun has started several of us."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


if __name__ == "__main__":
    sys.exit(main())
