"""`python -m subquad`, the same as `subquad`."""

import sys


def run() -> None:
    try:
        from subquad.cli import main
    except ModuleNotFoundError as error:
        print(f"subquad: error: the command line needs {error.name}; pip install 'subquad[cli]'", file=sys.stderr)
        sys.exit(2)
    sys.exit(main())


if __name__ == "__main__":
    run()
