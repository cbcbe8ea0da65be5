"""How long `import subquad` takes after torch, in processes of their own, one after another.

python benchmarks/imports.py --repeats 9
"""

import argparse
import statistics
import subprocess
import sys

PROGRAM = "import torch, time; start = time.perf_counter(); import subquad; print(time.perf_counter() - start)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    command = [sys.executable, "-c", PROGRAM]
    repeats = range(parser.parse_args().repeats)
    seconds = [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in repeats]
    print(f"import subquad: best {min(seconds):.3f} s, median {statistics.median(seconds):.3f} s of {len(seconds)}")


if __name__ == "__main__":
    main()
