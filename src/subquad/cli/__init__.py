"""The command `subquad`. One file per command; a user's mistake is one line and exit code 2."""

import os
import sys
import warnings
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from subquad.checks.extras import extra
from subquad.cli.bench import bench_app
from subquad.cli.bill import bill
from subquad.cli.calibrate import calibrate
from subquad.cli.convert import convert
from subquad.cli.demo import demo
from subquad.cli.diagnose import diagnose
from subquad.cli.doctor import doctor
from subquad.cli.embed import embed
from subquad.cli.generate import generate
from subquad.cli.score import score
from subquad.cli.spectrum import spectrum
from subquad.cli.train import train_app
from subquad.errors import SubquadError, printable

app = typer.Typer(
    name="subquad",
    help="Sub-quadratic attention: train, score, embed and sample protein, text and image models of any length.",
    epilog="Example: subquad train protein my.fasta --out runs/mine",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(train_app, name="train")
app.add_typer(bench_app, name="bench")
for command, example in (
    (generate, "subquad generate runs/mine --prompt MKT --length 5000 --output new.fasta"),
    (score, "subquad score runs/mine candidates.fasta --output scores.csv"),
    (embed, "subquad embed runs/mine proteins.fasta --output vectors.npz"),
    (spectrum, "subquad spectrum runs/mine proteins.fasta --length 512 --output spectrum.png"),
    (diagnose, "subquad diagnose runs/mine proteins.fasta --output heads.png"),
    (calibrate, "subquad calibrate runs/mine proteins.fasta --features auto --out runs/calibrated"),
    (convert, "subquad convert my-llama book.txt --budget 'exact 10%' --length 4096 --out my-llama-long"),
    (bill, "subquad bill my-llama-long other-book.txt --length 4096 --speed 1024,4096,16384 --output bill.json"),
    (demo, "subquad demo --out demo"),
    (doctor, "subquad doctor"),
):
    app.command(epilog=f"Example: {example}", no_args_is_help=command not in (demo, doctor))(command)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Show the version and leave.")] = False) -> None:
    if version:
        from importlib.metadata import version as version_of

        typer.echo(version_of("subquad"))


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; the exit code."""
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        return _run(arguments)


def _run(arguments: list[str] | None) -> int:
    try:
        with extra("the command line", "cli"):
            code = app(arguments, standalone_mode=False)
    except SubquadError as error:
        return _complain(str(error))
    except TyperException as error:
        message = getattr(error, "format_message", lambda: "")()
        return _complain(message) if message else error.exit_code if hasattr(error, "exit_code") else 2
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate memory" not in str(error):
            raise
        return _complain(f"out of memory ({error}); try a smaller model, window or batch")
    except KeyboardInterrupt:
        return _complain("interrupted", code=130)
    return code if isinstance(code, int) else 0


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Ours are for users, in one line; those of others are for developers."""
    if category.__module__.startswith("subquad"):
        print(f"subquad: warning: {printable(str(message))}", file=sys.stderr)
    else:
        print(warnings.formatwarning(message, category, filename, lineno, line), end="", file=sys.stderr)


def _complain(message: str, code: int = 2) -> int:
    if os.environ.get("RANK", "0") == "0":  # under torchrun once is enough
        print(f"subquad: error: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code
