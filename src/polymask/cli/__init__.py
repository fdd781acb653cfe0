"""The command line: one file a group of verbs, one dataclass a verb.

Results go to standard output, as tables or with --json as one JSON object; progress and messages go
to standard error. Exit codes: 0 done, 1 a problem that one line explains, 2 a command that makes no
sense, 130 stopped on request with everything saved.
"""

import os
import sys

from polymask.errors import InterruptedTraining, PolymaskError

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    if "--version" in words[:1]:
        from polymask.cli.version import print_version

        return print_version(words)
    from polymask.cli.parser import parse

    verb = parse(words)
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
    me = f"polymask (rank {os.environ['RANK']})" if several else "polymask"
    try:
        if several and not verb.in_ranks:
            raise PolymaskError(
                "torchrun is for learn; start this command without it (benchmark has --workers and --engine ray)"
            )
        verb.execute()
    except InterruptedTraining as stopped:
        print(f"{me}: {stopped}", file=sys.stderr)
        return 130
    except (PolymaskError, ImportError) as error:
        if verb.debug:
            raise
        print(f"{me}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("polymask: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has seen enough
        sys.stderr.close()
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
