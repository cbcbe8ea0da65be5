"""Hand-made bugs of files that must survive, and of what is said about them."""

from mutant import Mutant


def tests(name: str, words: str) -> str:
    return f"tests/test_{name}.py -k '{words}'"


FILES = (
    Mutant(
        "files: written in place",
        "files.py",
        "    try:\n        yield staging\n        _sync(staging)",
        "    try:\n        yield place\n        _sync(place)",
        tests("files", "appears_when or failed_write"),
    ),
    Mutant(
        "files: not brought to disk",
        "files.py",
        "        yield staging\n        _sync(staging)\n",
        "        yield staging\n",
        tests("files", "failed_write"),
    ),
    Mutant(
        "files: a failure leaves its staging",
        "files.py",
        "        staging.unlink(missing_ok=True)\n        raise",
        "        raise",
        tests("files", "failed_write"),
    ),
    Mutant(
        "files: a link is replaced instead of what it points to",
        "files.py",
        "Path(os.path.realpath(path))",
        "Path(path)",
        tests("files", "links_modes"),
    ),
    Mutant(
        "files: a private file becomes public",
        "files.py",
        "            shutil.copymode(place, staging)",
        "            pass",
        tests("files", "links_modes"),
    ),
    Mutant(
        "files: a protected file is replaced",
        "files.py",
        "    _refuse_read_only(place)\n    sweep",
        "    sweep",
        tests("files", "links_modes"),
    ),
    Mutant(
        "files: the living are swept",
        "files.py",
        "fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        tests("files", "the_dead_are_swept"),
    ),
    Mutant(
        "files: files of others are swept",
        "files.py",
        "_OURS.fullmatch(path.name)",
        "path.name.startswith(STAGING)",
        tests("files", "only_our_names"),
    ),
    Mutant(
        "files: a folder that was being replaced is lost",
        "files.py",
        "                old.rename(place)\n        shutil",
        "                pass\n        shutil",
        tests("files", "comes_back"),
    ),
    Mutant(
        "files: a failed rename loses the old folder",
        "files.py",
        "            old.rename(path)\n        raise",
        "            pass\n        raise",
        tests("files", "failed_rename"),
    ),
    Mutant(
        "files: what is swept before it is locked is written to",
        "files.py",
        "            if staging.exists():\n",
        "            if True:\n",
        tests("files", "comes_between"),
    ),
)
